import os
import threading

import pytest
from anonymous_pool import AnonymousPool
from nvme_kit import CAPACITY, KB, MB, NBYTES, SLAB, block, content, get, open_tier, put, right

from tiered_kv.checksum import checksum
from tiered_kv.errors import BadInput, TierBroken, UnknownName
from tiered_kv.folder import Folder
from tiered_kv.slots import SlotPool
from tiered_kv.tiers import io_engine, nvme
from tiered_kv.tiers.nvme_probe import Speed
from tiered_kv.types import Done, Failed, Medium, Why


@pytest.fixture
def folder(tmp_path):
    folder = Folder.open(tmp_path / "node")
    yield folder
    folder.close()


@pytest.fixture
def pool():
    pool = AnonymousPool(8 * MB)
    yield pool
    pool.close()


@pytest.fixture(params=["threads", "io_uring"])
def tier(request, folder, pool):
    try:
        tier = open_tier(folder, pool, engine=request.param)
    except TierBroken as error:
        if "io_uring is refused" in str(error):
            pytest.skip(str(error))
        raise
    yield tier
    tier.close()


def test_blocks_come_back_with_their_bytes_and_checksums(tier, pool):
    blocks = [block(n) for n in range(40)]
    outcomes, sealed = put(tier, pool, blocks)
    assert outcomes == [Done(checksum(memoryview(content(b.key)))) for b in blocks]
    back = list(reversed(sealed))
    outcomes, found = get(tier, pool, back)
    assert right(back, outcomes, found) == [True] * 40


def test_blocks_of_other_sizes_share_a_tier(tier, pool):
    slots = SlotPool(CAPACITY, SLAB)
    blocks = []
    for n, nbytes in enumerate((4 * KB, 12 * KB, NBYTES, 512 * KB, 100 * KB // 4096 * 4096)):
        for i, slot in enumerate(slots.take(nbytes, 3)):
            blocks.append(block(10 * n + i, slot, nbytes))
    outcomes, sealed = put(tier, pool, blocks)
    assert all(isinstance(o, Done) for o in outcomes)
    outcomes, found = get(tier, pool, sealed)
    assert all(right(sealed, outcomes, found))
    assert tier.restore() == sealed


def test_slots_are_spread_over_all_device_folders(folder, pool, tmp_path):
    paths = [tmp_path / "d0", tmp_path / "d1"]
    tier = open_tier(folder, pool, paths=paths)
    slots = SlotPool(CAPACITY, SLAB, stripes=2)
    blocks = [block(n, slot) for n, slot in enumerate(slots.take(NBYTES, 32))]
    _, sealed = put(tier, pool, blocks)
    tier.flush()
    for b in sealed:
        stripe, offset = slots.place(b.slot, NBYTES)
        with open(paths[stripe] / "blocks.data", "rb") as file:
            file.seek(offset)
            assert file.read(NBYTES) == content(b.key)
    assert not (folder.path / "blocks.data").exists()
    outcomes, found = get(tier, pool, sealed)
    assert all(right(sealed, outcomes, found))
    tier.close()


def test_the_next_incarnation_finds_what_was_written(tier, folder, pool):
    _, sealed = put(tier, pool, [block(n) for n in range(10)])
    tier.put_sessions([(b"id", b"doc", 5.0), (b"gone", b"", 6.0)])
    tier.drop([sealed[3].key])
    tier.drop_sessions([b"gone"])
    tier.close()
    tier = open_tier(folder, pool)
    assert tier.opened.fresh_because is None
    kept = sealed[:3] + sealed[4:]
    assert tier.restore() == kept
    assert tier.all_sessions() == [(b"id", b"doc", 5.0)]
    outcomes, found = get(tier, pool, kept)
    assert all(right(kept, outcomes, found))
    tier.close()


def test_blocks_of_another_geometry_are_not_restored(tier, folder, pool):
    put(tier, pool, [block(n) for n in range(10)])
    tier.close()
    tier = open_tier(folder, pool, slab_bytes=MB)
    assert tier.opened.dropped_rows == 10
    assert tier.restore() == []
    tier.close()


def test_rows_from_before_a_slab_changed_its_size_are_not_restored(tier, pool):
    _, old = put(tier, pool, [block(n) for n in range(10)])  # slab 0, and 2 slots of slab 1
    _, new = put(tier, pool, [block(90, SLAB + 64 * KB, 32 * KB)])  # slab 1 belongs to 32 KiB now
    assert tier.restore() == old[:8] + new
    assert tier._files.index.load() == old[:8] + new


def test_a_block_that_went_bad_in_the_pool_is_not_written(tier, pool):
    _, sealed = put(tier, pool, [block(n) for n in range(3)])
    moved = [b._replace(slot=b.slot + 10 * NBYTES) for b in sealed]
    for n, b in enumerate(sealed):
        pool.view(n * NBYTES, NBYTES)[:] = content(b.key)
    pool.view(NBYTES + 1000, 1)[0] ^= 16
    outcomes = tier.write(moved, [0, NBYTES, 2 * NBYTES])
    assert isinstance(outcomes[0], Done)
    assert isinstance(outcomes[2], Done)
    assert outcomes[1].why is Why.CORRUPT
    assert "in the pool" in outcomes[1].detail
    assert tier.restore() == [sealed[1], moved[0], moved[2]]
    with open(tier._files.stripes.files[0], "rb") as file:
        file.seek(moved[1].slot)
        assert file.read(NBYTES) == bytes(NBYTES)


def test_a_block_without_a_checksum_cannot_be_read(tier, pool):
    put(tier, pool, [block(0)])
    assert tier.read([block(0)], [0])[0].why is Why.CORRUPT


def test_rows_that_cannot_be_recorded_are_failures(tier, pool, monkeypatch):
    def put_rows(blocks):
        raise TierBroken("disk is full")

    _, old = put(tier, pool, [block(0)])
    monkeypatch.setattr(tier._files.index, "put", put_rows)
    outcomes, _ = put(tier, pool, [block(1), block(2)])
    assert outcomes == [Failed(Why.IO_ERROR, "disk is full")] * 2
    monkeypatch.undo()
    assert tier.restore() == old


def test_a_failed_transfer_has_no_row_and_does_not_touch_the_others(tier, pool, monkeypatch):
    class Failing:
        def run(self, ops, on_done, before=None):
            real.run(
                [op for i, op in enumerate(ops) if i != 1],
                lambda i, result: on_done(i + (i > 0), result),
                lambda i: before(i + (i > 0)),
            )
            on_done(1, -5)

    real = tier._engine
    monkeypatch.setattr(tier, "_engine", Failing())
    outcomes, sealed = put(tier, pool, [block(n) for n in range(3)])
    assert [type(o) for o in outcomes] == [Done, Failed, Done]
    assert outcomes[1].why is Why.IO_ERROR
    assert "Input/output error" in outcomes[1].detail
    assert tier.restore() == [sealed[0], sealed[2]]


BAD = {
    "outside": block(0, CAPACITY),
    "negative": block(0, -NBYTES),
    "between two slots": block(0, 4096),
    "beyond the slab's last slot": block(0, 480 * KB, 96 * KB),
    "unaligned size": block(0, 0, 1000),
    "nothing": block(0, 0, 0),
    "larger than a slab": block(0, 0, MB),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_is_no_slot_is_refused_before_anything_happens(tier, pool, bad):
    for verb in (tier.read, tier.write):
        with pytest.raises(BadInput, match="no NVMe slot"):
            verb([block(1), bad], [0, NBYTES])
    with pytest.raises(BadInput, match="2 blocks and 1 pool slots"):
        tier.write([block(1), block(2)], [0])
    assert tier.restore() == []


def test_reads_and_writes_run_in_many_threads_at_once(tier, pool):
    threads_, each = 6, 8
    lock, failures = threading.Lock(), []

    def work(n):
        base = n * each
        blocks = [block(base + i) for i in range(each)]
        slots = [b.slot for b in blocks]  # pool slots of its own
        for b in blocks:
            pool.view(b.slot, NBYTES)[:] = content(b.key)
        for _ in range(10):
            outcomes = tier.write(blocks, slots)
            sealed = [
                b._replace(checksum=o.checksum) for b, o in zip(blocks, outcomes, strict=True)
            ]
            targets = [4 * MB + s for s in slots]
            outcomes = tier.read(sealed, targets)
            found = [bytes(pool.view(t, NBYTES)) for t in targets]
            with lock:
                if not all(right(sealed, outcomes, found)):
                    failures.append(outcomes)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(threads_)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(tier.restore()) == threads_ * each


def test_the_probe_measures_and_touches_no_slot(tier, pool):
    _, sealed = put(tier, pool, [block(n) for n in range(CAPACITY // NBYTES)])
    probe = tier.probe()
    assert probe.medium is Medium.NVME
    assert probe.engine == tier.engine
    assert probe.write_bytes_per_s > 0 < probe.read_bytes_per_s
    outcomes, found = get(tier, pool, sealed)
    assert all(right(sealed, outcomes, found))


@pytest.mark.parametrize("faster", ["threads", "io_uring"])
def test_auto_takes_the_faster_engine_once(folder, pool, monkeypatch, faster):
    asked = []

    def measure(scratch, names, depth):
        asked.append(names)
        return {name: Speed(9.0, 9.0) if name == faster else Speed(20.0, 1.0) for name in names}

    try:
        open_tier(folder, pool, engine=faster).close()
    except TierBroken as error:
        pytest.skip(str(error))
    monkeypatch.setattr(nvme, "measure", measure)
    tier = open_tier(folder, pool)
    assert tier.probe().engine == tier.engine == faster
    tier.probe()
    assert asked == [("threads", "io_uring"), (faster,)]
    outcomes, _ = put(tier, pool, [block(1)])
    assert isinstance(outcomes[0], Done)
    tier.close()


def test_auto_does_without_an_engine_that_is_refused(folder, pool, monkeypatch):
    def refuse(memory, depth):
        raise TierBroken("io_uring is refused: Operation not permitted")

    monkeypatch.setitem(io_engine._known, "io_uring", refuse)
    tier = open_tier(folder, pool)
    assert tier.probe().engine == "threads"
    tier.close()
    with pytest.raises(TierBroken, match="Operation not permitted"):
        open_tier(folder, pool, engine="io_uring")


class Liar:
    """An engine that reports success and moves other bytes, or none."""

    name = "liar"

    def __init__(self, memory, depth):
        self._real = io_engine.make("threads", memory, depth)

    def run(self, ops, on_done, before=None):
        self._real.run(ops, lambda *_: None, before)
        for i, op in enumerate(ops):
            if not op.write and i == 3:
                op.view[100] ^= 1
            on_done(i, op.view.nbytes)

    def close(self):
        self._real.close()


def test_the_probe_finds_a_medium_that_changes_bytes(folder, pool, monkeypatch):
    monkeypatch.setitem(io_engine._known, "liar", Liar)
    tier = open_tier(folder, pool, engine="liar")
    with pytest.raises(TierBroken, match="came back changed"):
        tier.probe()
    tier.close()


def test_the_probe_names_what_the_medium_said(tier):
    with open("/dev/null") as null:
        os.dup2(null.fileno(), tier._files.scratch.fds[0])
    with pytest.raises(TierBroken, match="Bad file descriptor"):
        tier.probe()


def test_flush_leaves_everything_in_the_files(tier, folder, pool):
    _, sealed = put(tier, pool, [block(n) for n in range(5)])
    assert (folder.path / "index.db-wal").stat().st_size > 0
    tier.flush()
    assert (folder.path / "index.db-wal").stat().st_size == 0
    assert tier.restore() == sealed


def test_an_unknown_engine_leaves_nothing_open(folder, pool):
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(UnknownName, match="'spdk'"):
        open_tier(folder, pool, engine="spdk")
    with pytest.raises(BadInput):
        open_tier(folder, pool, slab_bytes=SLAB + 1000)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_closed_tier_refuses_everything_and_leaks_nothing(folder, pool):
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    tier = open_tier(folder, pool)
    _, sealed = put(tier, pool, [block(1)])
    tier.probe()
    tier.close()
    tier.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert not tier.healthy()
    calls = [
        lambda: tier.read(sealed, [0]),
        lambda: tier.write(sealed, [0]),
        lambda: tier.drop([sealed[0].key]),
        tier.restore,
        tier.flush,
        tier.probe,
        tier.all_sessions,
    ]
    for call in calls:
        with pytest.raises(TierBroken, match="closed"):
            call()


def test_the_pool_can_be_unmapped_after_calls(folder):
    pool = AnonymousPool(8 * MB)
    tier = open_tier(folder, pool)
    _, sealed = put(tier, pool, [block(n) for n in range(20)])
    get(tier, pool, sealed)
    pool.close()  # BufferError if the tier still held a view
    tier.close()


def test_status_tells_engine_and_files(tier):
    assert tier.engine in tier.describe()
    assert f"1 x {CAPACITY} bytes" in tier.describe()
    assert tier.healthy()
