"""`bench engine` without engines: what it concludes, what it refuses, how it talks to processes."""

import os
import sys
import time
from pathlib import Path

import pytest

from tiered_kv.bench.engine_contenders import (
    DRAM,
    FS,
    LMCACHE,
    NVME,
    OURS,
    PEERS,
    RECOMPUTE,
    EngineMissing,
    Pythons,
    check_peers,
    engine_python,
    free_ports,
    ours,
    peer,
    peers_python,
)
from tiered_kv.bench.engine_field import drop_from_page_cache, shape
from tiered_kv.bench.engine_pipe import Child, EngineFailed
from tiered_kv.bench.engine_results import Sample, Samples, left_out, missed, ttft, zero_hit
from tiered_kv.errors import BadInput

TESTS = Path(__file__).parents[1]
CPU_TIER = "vllm-cpu-tier"


def wakes(*seconds: float, cached: int = 4095, answer: int = 7) -> list[Sample]:
    return [Sample(s, cached, (answer,)) for s in seconds]


def collected(**rounds: list[Sample]) -> Samples:
    """Samples of 4,096 tokens: `anew`, `dram`, `nvme` are ours, the rest peers by tier."""
    samples = Samples()
    places = {
        "anew": (RECOMPUTE, ""),
        "dram": (OURS, DRAM),
        "nvme": (OURS, NVME),
        "cpu_tier": (CPU_TIER, DRAM),
        "lmcache": (LMCACHE, DRAM),
        "fs": (FS, NVME),
    }
    for what, found in rounds.items():
        name, tier = places[what]
        for sample in found:
            samples.add(name, 4096, tier, sample)
    return samples


def test_results_have_the_promised_names_bars_and_ratios():
    samples = collected(
        anew=wakes(6.0, 6.0, 9.0, cached=0),
        dram=wakes(0.1, 0.1, 0.1),
        nvme=wakes(0.2, 0.3, 0.2),
        cpu_tier=wakes(0.095, 0.1, 0.08),
        lmcache=wakes(0.5, 0.3, 0.5),
        fs=wakes(0.3, 0.3, 0.3),
    )
    found = {r.name: r for r in ttft(samples, (1024, 4096), (DRAM, NVME))}
    assert list(found) == [
        "engine/ttft/4096/dram",
        "engine/ttft/4096/dram/vs-vllm-cpu-tier",
        "engine/ttft/4096/dram/vs-lmcache",
        "engine/ttft/4096/nvme",
        "engine/ttft/4096/nvme/vs-vllm-fs",
    ]
    assert {name: r.bar for name, r in found.items()} == {
        "engine/ttft/4096/dram": None,
        "engine/ttft/4096/dram/vs-vllm-cpu-tier": 0.9,
        "engine/ttft/4096/dram/vs-lmcache": 4.0,
        "engine/ttft/4096/nvme": 10.0,
        "engine/ttft/4096/nvme/vs-vllm-fs": 1.0,
    }
    assert {name: r.ratio for name, r in found.items()} == pytest.approx(
        {
            "engine/ttft/4096/dram": 60.0,
            "engine/ttft/4096/dram/vs-vllm-cpu-tier": 0.95,
            "engine/ttft/4096/dram/vs-lmcache": 5.0,
            "engine/ttft/4096/nvme": 30.0,
            "engine/ttft/4096/nvme/vs-vllm-fs": 1.5,
        }
    )
    assert all(r.holds for r in found.values() if r.bar)
    nvme = found["engine/ttft/4096/nvme"]
    assert (nvme.value, nvme.unit, nvme.against, nvme.against_value) == (0.2, "s", RECOMPUTE, 6.0)


def test_a_ratio_pairs_the_samples_of_a_round():
    # The machine was ten times slower in the last round, for both.
    samples = collected(anew=wakes(1.0, 2.0, 20.0, cached=0), nvme=wakes(0.1, 0.1, 2.0))
    [result] = ttft(samples, (4096,), (NVME,))
    assert result.ratio == pytest.approx(10.0)
    assert result.holds is True


def test_our_own_miss_counts_as_the_slow_wake_that_it_is():
    ours = [*wakes(0.1), *wakes(6.0, 6.0, cached=0)]
    samples = collected(anew=wakes(6.0, 6.0, 6.0, cached=0), nvme=ours)
    [result] = ttft(samples, (4096,), (NVME,))
    assert result.ratio == pytest.approx(1.0)
    assert result.holds is False


def test_a_peers_missed_round_is_no_time_of_its_cache():
    theirs = [*wakes(0.1, 0.1), *wakes(6.0, cached=0)]
    samples = collected(anew=wakes(6, 6, 6, cached=0), dram=wakes(0.1, 0.1, 0.2), cpu_tier=theirs)
    result = ttft(samples, (4096,), (DRAM,))[1]
    assert (result.against_value, result.ratio) == (0.1, 1.0)
    assert missed(theirs, 4096) == 1
    assert not left_out(theirs, 4096)


def test_a_peer_that_mostly_misses_is_not_compared_with():
    theirs = [*wakes(0.1), *wakes(6.0, 6.0, cached=0)]
    samples = collected(anew=wakes(6, 6, 6, cached=0), dram=wakes(0.1, 0.1, 0.2), lmcache=theirs)
    assert [r.name for r in ttft(samples, (4096,), (DRAM,))] == ["engine/ttft/4096/dram"]
    assert left_out(theirs, 4096)


def test_a_peer_that_failed_halfway_is_compared_in_the_rounds_that_it_had():
    samples = collected(
        anew=wakes(6, 6, 6, cached=0), dram=wakes(0.1, 0.1, 0.4), lmcache=wakes(0.5)
    )
    result = ttft(samples, (4096,), (DRAM,))[1]
    assert (result.value, result.ratio) == (0.1, 5.0)


def test_answers_that_differ_from_the_computed_one_are_counted():
    samples = collected(
        anew=wakes(6, 6, cached=0), dram=[*wakes(0.1), *wakes(0.1, answer=8)], nvme=wakes(0.2)
    )
    assert samples.different() == 1


def test_throughput_without_hits_compares_passes_in_pairs():
    [result] = zero_hit(1000, ours=[10.0, 20.0, 10.2], bare=[10.0, 19.8, 10.0])
    assert result.name == "engine/zero-hit-throughput"
    assert (result.bar, result.unit) == (0.97, "tokens/s")
    assert result.ratio == pytest.approx(0.99)
    assert result.holds is True
    assert zero_hit(1000, ours=[], bare=[]) == []


def test_peers_come_in_one_order_and_unknown_ones_are_named():
    assert check_peers(["lmcache", "vllm-cpu-tier"]) == ("vllm-cpu-tier", "lmcache")
    with pytest.raises(BadInput, match=r"--peers: 'redis' is not one of vllm-cpu-tier, vllm-fs"):
        check_peers(["lmcache", "redis"])


def test_a_python_that_is_not_there_is_named():
    with pytest.raises(BadInput, match="--engine-python: '/no/python' is no program"):
        engine_python("/no/python")
    with pytest.raises(BadInput, match="--peers-python: '/no/python' is no program"):
        peers_python("/no/python")
    assert engine_python(sys.executable) == Path(sys.executable)


def test_without_any_vllm_the_command_to_run_is_told(monkeypatch, tmp_path):
    from tiered_kv.bench import engine_contenders

    monkeypatch.setattr(engine_contenders, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match="make setup-engine"):
        engine_python(None)
    assert peers_python(None) is None
    beside = tmp_path / ".venv-engine" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert engine_python(None) == beside


def test_contenders_measure_the_tiers_that_they_have(tmp_path):
    pythons = Pythons(Path("/e/bin/python"), Path("/p/bin/python"))
    found = {name: peer(name, tmp_path, pythons) for name in PEERS}
    assert {name: one.tiers for name, one in found.items()} == {
        "vllm-cpu-tier": ("dram",),
        "vllm-fs": ("nvme",),
        "lmcache": ("dram",),
    }
    assert [name for name, one in found.items() if one.foreign] == ["lmcache"]
    assert ours({}).tiers == ("dram", "nvme")
    server = found["lmcache"].server
    assert server[:2] == ("/p/bin/lmcache", "server")
    assert found["lmcache"].port == int(server[server.index("--port") + 1])


def test_free_ports_are_different_ones():
    assert len(set(free_ports(3))) == 3


def test_the_shape_of_a_model_comes_from_its_config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576}')
    assert shape(tmp_path) == {"layers": 30, "kv_heads": 9, "head_dim": 64}
    file.write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,'
        ' "hidden_size": 64, "head_dim": 32}'
    )
    assert shape(tmp_path) == {"layers": 2, "kv_heads": 1, "head_dim": 32}


def test_dropping_files_from_the_page_cache_keeps_their_bytes(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "data").write_bytes(b"x" * 10_000)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    drop_from_page_cache(tmp_path)
    assert (tmp_path / "below" / "data").read_bytes() == b"x" * 10_000


@pytest.fixture
def child(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(TESTS)}
    with Child("helper", Path(sys.executable), "pipe_process", environ, tmp_path / "log") as one:
        yield one


def test_a_process_answers_and_what_it_prints_is_no_answer(child, tmp_path):
    assert child.ask("twice", text="a b") == "a ba b"
    assert child.ask("twice", text="ä\n") == "ä\nä\n"
    assert "printed beside" in (tmp_path / "log").read_text()


def test_a_failed_verb_is_told_and_the_process_goes_on(child):
    with pytest.raises(EngineFailed, match=r"helper fail: ValueError\('on purpose'\)"):
        child.ask("fail")
    assert child.ask("twice", text="x") == "xx"


def test_a_process_that_ended_is_told_with_its_last_words(child):
    with pytest.raises(EngineFailed, match=r"ended while it was asked 'die'.*last words"):
        child.ask("die")
    with pytest.raises(EngineFailed):
        child.ask("twice", text="x")


def test_a_process_that_does_not_answer_in_time_is_told(child):
    with pytest.raises(EngineFailed, match="did not answer 'sleep' in time"):
        child.ask("sleep", timeout_s=0.05, seconds=60)
    child.close(patience_s=0.05)
    assert not Path(f"/proc/{child.pid}").exists()


def test_a_process_ends_with_its_parents_side(child):
    pid, below = child.pid, child.ask("start_another")
    child.close()
    assert not Path(f"/proc/{pid}").exists()
    end = time.monotonic() + 30  # the one below ends on its own: its input ended
    while Path(f"/proc/{below}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{below}").exists()
