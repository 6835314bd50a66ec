"""One configuration from a file, the environment and overrides; each error names field and
value."""

import json
import re

import pytest

from tiered_kv.config import Config, Service
from tiered_kv.errors import BadConfig
from tiered_kv.settings import load
from tiered_kv.sizes import MAX_BYTES, Size, parse_size


def from_overrides(**sections):
    return load(overrides=sections, environ={})


def from_file(tmp_path, text, environ=None, overrides=None):
    path = tmp_path / "kv.toml"
    path.write_text(text)
    return load(path, overrides=overrides, environ=environ or {})


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (0, 0), (4096, 4096), ("0", 0), ("64MiB", 64 << 20), ("64mib", 64 << 20),
        ("1.5TiB", 3 << 39), (" 2 GB ", 2 * 10**9), ("7", 7), ("7B", 7), ("0.5KiB", 512),
        ("1e3", None), (1024.0, 1024), (MAX_BYTES, MAX_BYTES), ("1024TiB", MAX_BYTES),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_are_integers_or_text_with_a_unit(given, size):
    if size is None:
        with pytest.raises(BadConfig):
            parse_size(given)
    else:
        assert parse_size(given) == size


@pytest.mark.parametrize(
    "bad",
    [
        -1, "-64MiB", MAX_BYTES + 1, "1025TiB", "9" * 400, 10**400, float("nan"), float("inf"),
        "nan", "inf", "", "MiB", "64 M iB", "64XiB", "1.5", 1.5, "0.3KiB", True, None, [1], "1_000",
        "0x10", "٣MiB",
    ],
    ids=lambda bad: repr(bad)[:12],
)  # fmt: skip
def test_other_sizes_are_refused_and_shown(bad):
    with pytest.raises(BadConfig) as caught:
        parse_size(bad)
    assert repr(bad)[:20] in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["64MiB", "1.5TiB", "1GiB", "1000B", "0B", "1.0625GiB"])
def test_a_size_prints_as_what_it_is_read_from(text):
    assert str(parse_size(text)) == text
    assert parse_size(str(parse_size(text))) == parse_size(text)


def test_defaults_are_valid():
    assert load(environ={}) == Config()


def test_later_sources_win_field_by_field(tmp_path):
    text = '[dram]\nbytes = "2GiB"\nhigh = 0.8\nfolder = "/a"\n[nvme]\nbytes = 0\n'
    environ = {"TIERED_KV_DRAM_BYTES": "3GiB", "TIERED_KV_DRAM_FOLDER": "/b", "PATH": "/bin"}
    config = from_file(tmp_path, text, environ, {"dram": {"folder": "/c"}})
    assert (config.dram.high, config.dram.bytes, config.dram.folder) == (0.8, 3 << 30, "/c")
    assert config.nvme.bytes == 0


def test_the_file_may_be_named_by_the_environment(tmp_path):
    (tmp_path / "kv.toml").write_text("[service]\nrecent_s = 5\n")
    config = load(environ={"TIERED_KV_CONFIG": str(tmp_path / "kv.toml")})
    assert config.service.recent_s == 5.0


def test_only_the_result_of_all_sources_has_to_be_valid(tmp_path):
    config = from_file(tmp_path, "[dram]\nhigh = 0.5\n", {"TIERED_KV_DRAM_LOW": "0.4"})
    assert (config.dram.low, config.dram.high) == (0.4, 0.5)


def test_lists_and_numbers_are_read_from_the_environment():
    config = load(
        environ={
            "TIERED_KV_NVME_DEVICES": "/d0,/d1",
            "TIERED_KV_NVME_QUEUE_DEPTH": "1",
            "TIERED_KV_NVME_FREE_FLOOR_BYTES": "2MiB",
            "TIERED_KV_SERVICE_LEASE_TTL_S": "1.5",
        }
    )
    assert config.nvme.devices == ("/d0", "/d1")
    assert config.nvme.queue_depth == 1
    assert config.nvme.free_floor_bytes == 2 << 20
    assert config.service.lease_ttl_s == 1.5


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"drum": {}}, "no section 'drum'; there are dram, hbm, nvme, service"),
        ({"dram": 7}, "dram must be a section, not 7"),
        ({"dram": {"size": 1}}, "no field dram.size; there are bytes, high, low"),
        ({"dram": {"bytes": "much"}}, "dram.bytes: 'much' is not a size"),
        ({"dram": {"bytes": -5}}, "dram.bytes: size -5"),
        ({"dram": {"bytes": 4096}}, "dram.bytes 4KiB is below 1MiB"),
        ({"hbm": {"bytes": 1}}, "hbm.bytes 1B is neither 0 nor at least 1MiB"),
        ({"nvme": {"bytes": 1}}, "nvme.bytes 1B is neither 0 nor at least 1MiB"),
        ({"dram": {"high": "tall"}}, "dram.high: 'tall' is not float"),
        ({"dram": {"high": 0.1}}, r"dram: need 0 < low <= high <= 1, not low 0.75 and high 0.1"),
        ({"dram": {"high": float("nan")}}, "high nan"),
        ({"nvme": {"low": 0}}, "nvme: need 0 < low .* low 0"),
        ({"hbm": {"high": 1.01}}, "high 1.01"),
        ({"dram": {"policy": "best"}}, "dram.policy 'best' is not one of .*lru"),
        ({"dram": {"restore_floor": 1}}, r"dram.restore_floor 1(\.0)? is not in"),
        ({"dram": {"restore_floor": float("nan")}}, "restore_floor nan"),
        ({"dram": {"slab_bytes": "2GiB"}}, "dram.slab_bytes 2GiB is more than dram.bytes 1GiB"),
        ({"dram": {"slab_bytes": 5000}}, "dram.slab_bytes 5000B is no multiple of 1 x 4096"),
        ({"dram": {"folder": "/a\0b"}}, "dram.folder has a NUL"),
        ({"hbm": {"verify": -0.1}}, "hbm.verify -0.1"),
        ({"hbm": {"verify": float("nan")}}, "hbm.verify nan"),
        ({"hbm": {"device": "tpu"}}, "hbm.device 'tpu'"),
        ({"nvme": {"engine": "spdk"}}, "nvme.engine 'spdk' is not one of auto, threads, io_uring"),
        ({"nvme": {"queue_depth": 0}}, "nvme.queue_depth 0"),
        ({"nvme": {"queue_depth": 8.5}}, r"nvme.queue_depth: 8\.5 is not int"),
        ({"nvme": {"queue_depth": float("inf")}}, "nvme.queue_depth: inf is not int"),
        ({"nvme": {"queue_depth": True}}, "nvme.queue_depth: True is not int"),
        ({"nvme": {"devices": 3}}, "nvme.devices: 3 is not a list of folders"),
        ({"nvme": {"devices": ["/a", "/a"]}}, r"nvme.devices \['/a', '/a'\] names a folder twice"),
        ({"nvme": {"folder": 7}}, "nvme.folder: 7 is not str"),
        (
            {"nvme": {"devices": ["/a", "/b", "/c"], "slab_bytes": "1MiB"}},
            "nvme.slab_bytes 1MiB is no multiple of 3 x 4096",
        ),
        ({"service": {"lease_ttl_s": 0}}, "service.lease_ttl_s 0"),
        ({"service": {"recent_s": -1}}, "service.recent_s -1"),
        ({"service": {"wake_deadline_s": float("nan")}}, "service.wake_deadline_s nan"),
        ({"service": {"move_deadline_s": float("inf")}}, "service.move_deadline_s inf"),
        ({"service": {"lease_ttl_s": 10**9}}, "service.lease_ttl_s 1000000000"),
        ({"service": {"prefetch": "guess"}}, "service.prefetch 'guess' is not one of none, on_pre"),
        ({"service": {"session_ttl_s": -1}}, "service.session_ttl_s -1"),
        ({"service": {"session_ttl_s": float("nan")}}, "service.session_ttl_s nan"),
        ({"service": {"gpu_fraction": 0}}, "service.gpu_fraction 0"),
        ({"service": {"namespace": ""}}, "service.namespace '' is empty"),
        (
            {"service": {"wake_deadline_s": 20}},
            "service.wake_deadline_s 20.0 must be shorter than service.call_timeout_s 15.0",
        ),
        ({"service": {"call_timeout_s": 1}}, "must be shorter than service.call_timeout_s 1.0"),
        ({"service": {"tenant_secret": ""}}, "service.tenant_secret has 0 bytes, not 1 to 64"),
        ({"service": {"tenant_secret": "s" * 65}}, "service.tenant_secret has 65 bytes"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_its_field(sections, says):
    with pytest.raises(BadConfig, match=says):
        load(overrides=sections, environ={})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"TIERED_KV_DRUM_BYTES": "1"}, "environment: no section 'drum'"),
        ({"TIERED_KV_DRAM_BITES": "1"}, "environment: no field dram.bites; there are bytes"),
        ({"TIERED_KV_DRAM": "1"}, "environment: TIERED_KV_DRAM names no field"),
        ({"TIERED_KV_DRAM_BYTES": ""}, "environment: dram.bytes: '' is not a size"),
        ({"TIERED_KV_DRAM_HIGH": "x"}, "environment: dram.high: 'x' is not float"),
    ],
    ids=str,
)
def test_an_unknown_variable_is_an_error_that_lists_the_known_ones(environ, says):
    with pytest.raises(BadConfig, match=says):
        load(environ=environ)


@pytest.mark.parametrize(
    "text", ["[dram\n", "[dram]\nbytes = \n", "[dram]\nbytes = 1\nbytes = 2\n", "dram = 7\n"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text):
    with pytest.raises(BadConfig, match=re.escape(str(tmp_path / "kv.toml"))):
        from_file(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadConfig, match=f"{tmp_path}/none.toml: No such file"):
        load(tmp_path / "none.toml", environ={})
    with pytest.raises(BadConfig, match=f"{tmp_path}: Is a directory"):
        load(tmp_path, environ={})
    (tmp_path / "latin.toml").write_bytes(b"[dram]\nfolder = '\xe9'\n")
    with pytest.raises(BadConfig, match=r"latin\.toml"):
        load(tmp_path / "latin.toml", environ={})


def test_the_secret_is_never_printed(tmp_path):
    secret = "swordfish"
    config = from_overrides(service={"tenant_secret": secret})
    assert config.service.tenant_secret == secret
    shown = [repr(config), str(config), config.describe(), json.dumps(config.as_dict())]
    shown.append(repr(config.service))
    bad = [["swordfish"], {"a": "swordfish"}, b"swordfish"]
    for value in bad:
        with pytest.raises(BadConfig, match=r"service\.tenant_secret: what was given") as caught:
            from_overrides(service={"tenant_secret": value})
        shown.append(str(caught.value))
    for value in (secret * 10, secret + "\udc80"):
        with pytest.raises(BadConfig, match=r"service\.tenant_secret") as caught:
            from_overrides(service={"tenant_secret": value})
        shown.append(str(caught.value))
    with pytest.raises(BadConfig) as caught:
        from_file(tmp_path, f'[service]\ntenant_secret = "{secret}\n')
    shown.append(str(caught.value))
    assert [text for text in shown if secret in text] == []


def test_a_description_has_a_line_a_section_and_readable_sizes():
    lines = Config().describe().splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["hbm", "dram", "nvme", "service"]
    assert "bytes=1GiB" in lines[1]


def test_folders_have_defaults(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    config = Config()
    assert str(config.nvme_folder) == "/cache/tiered_kv/nvme"
    assert str(config.shm_folder).startswith("/dev/shm/tiered_kv-")
    assert Service().namespace == "tiered_kv"
    assert str(Size(3 << 19)) == "1.5MiB"


@pytest.mark.parametrize("policy", ["min", "lru_head_first"])
def test_a_policy_that_is_only_there_to_compare_with_is_refused_in_a_service(policy):
    with pytest.raises(BadConfig, match=f"dram.policy '{policy}' is not one of adaptive"):
        load(overrides={"dram": {"policy": policy}}, environ={})
