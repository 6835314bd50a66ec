import json
from pathlib import Path

import pytest

from tiered_kv.errors import BadConfig, BadInput, UnknownName
from tiered_kv.sim import models, profiles
from tiered_kv.sim.clock import Clock
from tiered_kv.sim.gpu import Gpu, Rates


@pytest.mark.parametrize(
    ("name", "billions", "active", "kv_bytes"),
    [
        ("llama-3.1-8b", 8.03, 8.03, 131_072),
        ("llama-3.3-70b", 70.55, 70.55, 327_680),
        ("llama-3.1-405b", 405.9, 405.9, 516_096),
        ("qwen3-32b", 32.76, 32.76, 262_144),
        ("mixtral-8x7b", 46.7, 12.9, 131_072),
        ("deepseek-v3", 671.0, 37.0, 70_272),
    ],
)
def test_the_table_gives_the_published_sizes(
    name: str, billions: float, active: float, kv_bytes: int
) -> None:
    model = models.model(name)
    assert model.params / 1e9 == pytest.approx(billions, rel=0.002)
    assert model.active / 1e9 == pytest.approx(active, rel=0.02)
    assert model.kv_bytes == kv_bytes


def test_32k_tokens_of_the_70b_model_are_ten_gibibytes() -> None:
    assert 32_768 * models.model("llama-3.1-70b").kv_bytes == 10 * 2**30


def test_quantised_kv_and_weights_are_half_as_large() -> None:
    half = models.model("llama-3.1-70b", weights="float8_e4m3fn", kv="float8_e4m3fn")
    assert half.kv_bytes == 163_840
    assert half.weight_bytes == pytest.approx(70.55e9, rel=0.001)


def test_a_config_file_and_its_folder_give_the_same_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(models.BUILT_IN["llama-3.1-8b"]))
    assert models.model(str(file)).kv_bytes == 131_072
    assert models.model(str(tmp_path)).params == models.model("llama-3.1-8b").params


@pytest.mark.parametrize(
    "fields",
    [{"sliding_window": 4096}, {"layer_types": ["full_attention", "linear_attention"]},
     {"layer_types": ["sliding_attention"]}],
)  # fmt: skip
def test_windows_and_linear_attention_are_counted_in_full_and_said_so(fields: dict) -> None:
    config = models.BUILT_IN["qwen3-32b"] | fields
    assert "upper bound" in models.from_config("windowed", config).notes[0]


def test_a_window_that_is_not_used_is_not_mentioned() -> None:
    config = models.BUILT_IN["qwen3-32b"] | {"sliding_window": 4096, "use_sliding_window": False}
    assert models.from_config("whole", config).notes == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ("{}", "num_hidden_layers = None"),
        ('{"num_hidden_layers": -3}', "num_hidden_layers = -3"),
        ('{"num_hidden_layers": "many"}', "num_hidden_layers = 'many'"),
    ],
)
def test_a_bad_config_file_is_one_line_with_its_field(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        models.model(str(file))


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"llama-4-9000b.*deepseek-v3"):
        models.model("llama-4-9000b")


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="float4"):
        models.model("llama-3.1-8b", kv="float4")


@pytest.mark.parametrize("name", profiles.names())
def test_every_number_of_a_shipped_profile_has_its_source(name: str) -> None:
    profile = profiles.load(name)
    assert profile.gpu.count == 8
    assert len(profile.sources) >= 35
    assert all(len(source) > 5 for source in profile.sources.values())


def edited(tmp_path: Path, old: str, new: str) -> str:
    text = (profiles.FOLDER / "designed-for.toml").read_text()
    assert old in text
    file = tmp_path / "mine.toml"
    file.write_text(text.replace(old, new, 1))
    return str(file)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("value = 8,", "value = -8,", "gpu.count = -8 must be positive"),
        ("value = 8,", "value = 2.5,", "gpu.count = 2.5 must be a whole number"),
        ("value = 80e9", "value = nan", "gpu.hbm_bytes = nan must be a number"),
        ("value = 0.90", "value = 1.5", "gpu.high = 1.5 must be a share"),
        ("value = 0.80", "value = 0.95", "gpu.low = 0.95 is above high"),
        ("hbm_bytes =", "hbm_bites =", "gpu.hbm_bites"),
        ('source = "reference: 8 x H100"', 'source = ""', "must say where"),
        ("[dram]", "[ram]", "ram"),
        ("title", "uses = ['part-of-nothing']\ntitle", "part-of-nothing"),
        ("[gpu]", "[gpu", "mine.toml"),
    ],
)
def test_an_impossible_profile_names_field_and_value(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(BadConfig, match=says):
        profiles.load(edited(tmp_path, old, new))


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"h900.*designed-for"):
        profiles.load("h900")


RATES = Rates(models.model("llama-3.1-70b"), 8 * 989e12, 8 * 3.35e12, 0.5, 0.7)


def test_prefill_is_bound_by_flops_and_grows_faster_than_its_length() -> None:
    linear = 2 * 70.55e9 * 8192 / (8 * 989e12 * 0.5)
    assert linear < RATES.prefill_s(8192) < 1.2 * linear
    assert RATES.prefill_s(32768) > 4 * RATES.prefill_s(8192)
    assert RATES.prefill_s(8192) + RATES.prefill_s(8192, 8192) == pytest.approx(
        RATES.prefill_s(16384)
    )


def test_a_decode_step_reads_weights_once_and_the_kv_of_each_sequence() -> None:
    alone = RATES.step_s(1, 0)
    assert alone == pytest.approx(141.1e9 / (26.8e12 * 0.7), rel=0.001)
    assert RATES.step_s(1, 32768) - alone == pytest.approx(10.737e9 / (26.8e12 * 0.7), rel=0.001)


def test_a_mixture_of_experts_reads_more_weights_in_a_larger_batch() -> None:
    model = models.model("mixtral-8x7b")
    assert model.weights_read(1) == pytest.approx(2 * model.active)
    assert 0.99 * model.weight_bytes < model.weights_read(64) <= model.weight_bytes


def test_decode_goes_on_while_others_prefill_but_more_slowly() -> None:
    clock, ended = Clock(), {}
    gpu = Gpu(clock, RATES)
    gpu.decode(100, 8192).then(lambda: ended.setdefault("alone", clock.now))
    clock.run()
    began = clock.now
    gpu.decode(100, 8192).then(lambda: ended.setdefault("mixed", clock.now - began))
    gpu.prefill(32768, 0).then(lambda: ended.setdefault("prefill", clock.now - began))
    clock.run()
    assert ended["alone"] == pytest.approx(100 * RATES.step_s(1, 8242))
    assert ended["mixed"] > ended["alone"]
    assert ended["prefill"] > RATES.prefill_s(32768)
