import itertools
import os
import shutil
import time
from pathlib import Path

import pytest

from tiered_kv.bench import io, io_raw
from tiered_kv.bench.contest import Contender, Pass, contest, judge
from tiered_kv.errors import BadInput, TierBroken, UnknownName
from tiered_kv.tiers.nvme import NvmeTier
from tiered_kv.types import Failed, Why

KB, MB = 1 << 10, 1 << 20


def scripted(name, ours, seconds, log, judged=True):
    script = iter(seconds)

    def run():
        log.append(name)
        return Pass(next(script), 0.5)

    return Contender(name, ours, run, judged)


def test_contenders_meet_in_every_round_in_alternating_order():
    log = []
    rivals = [
        scripted("a", True, itertools.repeat(1.0), log),
        scripted("b", False, itertools.repeat(1.0), log),
    ]
    passes = contest(rivals, 4, time.monotonic() + 100)
    assert log == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(p) for name, p in passes.items()} == {"a": 4, "b": 4}


@pytest.mark.parametrize(("rounds", "made"), [(2, 2), (3, 3), (9, 3)])
def test_without_time_left_three_rounds_are_made(rounds, made):
    rivals = [scripted("a", True, itertools.repeat(1.0), [])]
    assert len(contest(rivals, rounds, time.monotonic() - 1)["a"]) == made


def test_ours_is_compared_with_the_fastest_other_round_by_round():
    rivals = [
        scripted("ours", True, [2.0, 4.0, 40.0], []),
        scripted("free", True, [9.0, 9.0, 9.0], [], judged=False),
        scripted("slow", False, [5.0, 5.0, 5.0], []),
        scripted("fast", False, [1.0, 3.0, 30.0], []),
    ]
    passes = contest(rivals, 3, time.monotonic() + 100)
    results = {r.name: r for r in judge("leg", 4096, 12 * 10**9, rivals, passes, 0.85)}
    ours = results["io/leg/ours/4096"]
    assert (ours.value, ours.against, ours.against_value) == (3.0, "fast", 4.0)
    assert ours.ratio == 0.75  # the median of 1/2, 3/4, 30/40
    assert ours.holds is False
    assert results["io/leg/free/4096"].holds is None
    assert results["io/leg/free/4096"].against == "fast"
    assert results["io/leg/slow/4096"].value == 2.4
    assert results["io/leg/ours/4096/cpu-s-per-gb"].value == 0.5 / 12


@pytest.fixture
def left():
    """What benchmarks leave in shared memory."""

    def names():
        return {
            p
            for p in Path("/dev/shm").rglob("bench-*")
            if str(os.getpid()) in p.name or p.name.startswith("bench-io-")
        }

    before = names()
    return lambda: names() - before


def test_every_nvme_leg_is_measured_for_every_engine_and_block_size(tmp_path, left):
    said = []
    results = io.run(
        folder=tmp_path / "new",
        sizes=(64 * KB, 2 * MB),
        rounds=2,
        nbytes=8 * MB,
        legs=["dram-to-nvme", "nvme-to-dram"],
        progress=said.append,
    )
    by_name = {r.name: r for r in results}
    assert len(by_name) == len(results)
    if "registered" not in said[0] and "plain" not in said[0]:
        pytest.skip("io_uring is refused here")
    for leg, engine, size in itertools.product(
        ("dram-to-nvme", "nvme-to-dram"), ("threads", "io_uring"), (64 * KB, 2 * MB)
    ):
        speed = by_name[f"io/{leg}/{engine}/{size}"]
        assert speed.value > 0
        assert speed.unit == "GB/s"
        assert speed.against.startswith("raw-") or speed.against == "fio"
        assert speed.bar == (0.85 if size == 2 * MB else None)
        cpu = by_name[f"io/{leg}/{engine}/{size}/cpu-s-per-gb"]
        assert (cpu.unit, cpu.bar) == ("CPU s/GB", None)
        others = {name.split("/")[2] for name in by_name if name.startswith(f"io/{leg}/")}
        assert {"raw-threads-4", "raw-threads-8", "raw-uring-8", "raw-uring-32"} <= others
        assert ("fio" in others) == (shutil.which("fio") is not None)
    assert list((tmp_path / "new").iterdir()) == []
    assert left() == set()


def test_the_hbm_legs_state_copies_with_and_without_verification(tmp_path, left):
    said = []
    results = io.run(
        folder=tmp_path,
        sizes=(2 * MB,),
        rounds=2,
        nbytes=8 * MB,
        legs=["hbm-to-dram", "dram-to-hbm"],
        progress=said.append,
    )
    by_name = {r.name: r for r in results}
    for leg in ("hbm-to-dram", "dram-to-hbm"):
        plain = by_name[f"io/{leg}/copy/{2 * MB}"]
        verified = by_name[f"io/{leg}/copy-verified/{2 * MB}"]
        assert plain.against == verified.against == "torch-copy"
        assert (plain.bar, verified.bar) == (0.85, None)
    assert "HBM" in said[0]
    assert left() == set()


def test_legs_and_engines_can_be_chosen(tmp_path):
    results = io.run(
        folder=tmp_path,
        sizes=(64 * KB,),
        rounds=1,
        nbytes=MB,
        legs=["nvme-to-dram"],
        engines=["threads"],
    )
    names = {r.name.split("/")[1] + "/" + r.name.split("/")[2] for r in results}
    assert "nvme-to-dram/threads" in names
    assert not {n for n in names if "io_uring" in n or not n.startswith("nvme-to-dram")}


@pytest.mark.parametrize("bad", [{"legs": ["dram-to-moon"]}, {"engines": ["spdk"]}])
def test_unknown_names_are_answered_with_the_known_ones(tmp_path, bad):
    with pytest.raises(UnknownName, match=r"(moon.*dram-to-nvme)|(spdk.*io_uring)"):
        io.run(folder=tmp_path, **bad)


@pytest.mark.parametrize("size", [0, 1000, 3 * MB])
def test_a_block_size_that_does_not_divide_the_work_is_refused(tmp_path, size):
    with pytest.raises(BadInput, match=f"blocks of {size} bytes"):
        io.run(folder=tmp_path, sizes=(size,), nbytes=8 * MB)


def test_a_block_that_fails_ends_the_measurement(tmp_path, monkeypatch, left):
    def read(self, blocks, into):
        return [Failed(Why.CORRUPT, "flipped")] * len(blocks)

    monkeypatch.setattr(NvmeTier, "read", read)
    with pytest.raises(TierBroken, match="flipped"):
        io.run(folder=tmp_path, sizes=(64 * KB,), rounds=1, nbytes=MB, legs=["nvme-to-dram"])
    assert list(tmp_path.iterdir()) == []
    assert left() == set()


def test_the_bare_loops_move_every_byte(tmp_path):
    from tiered_kv.bench.io_memory import SharedMemory

    with SharedMemory(2 * MB) as memory, io_raw.RawFile(tmp_path / "f", memory, 2 * MB) as raw:
        whole = memory.view(0, 2 * MB)
        pairs = zip(raw.contenders(True, 256 * KB), raw.contenders(False, 256 * KB), strict=True)
        for write, read in pairs:
            if write.name == "fio":
                continue  # a program of its own, that fills its buffers as it likes
            whole[:] = os.urandom(2 * MB)
            write.run()
            written = (tmp_path / "f").read_bytes()
            assert whole == written, write.name
            whole[:] = bytes(2 * MB)
            read.run()
            assert whole == written, read.name
        whole.release()
