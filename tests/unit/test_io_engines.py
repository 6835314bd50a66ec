"""The same tests over both engines."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from anonymous_pool import AnonymousPool

from tiered_kv.errors import TierBroken, UnknownName
from tiered_kv.tiers import io_engine, io_threads, io_uring
from tiered_kv.tiers.io_engine import IoOp
from tiered_kv.tiers.uring import Ring

PAGE = 4096
ENGINES = ("threads", "io_uring")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool():
    pool = AnonymousPool(256 * PAGE)
    yield pool
    pool.close()


def make(name, pool, depth=4):
    try:
        return io_engine.make(name, pool, depth)
    except TierBroken as error:
        if name == "io_uring":
            pytest.skip(f"this kernel refuses it: {error}")
        raise


@pytest.fixture(params=ENGINES)
def engine(request, pool):
    engine = make(request.param, pool)
    yield engine
    engine.close()


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.ftruncate(fd, 128 * PAGE)
    yield fd
    os.close(fd)


def op(pool, fd, *, write, at, slot, pages=1):
    slot *= PAGE
    return IoOp(write, fd, at * PAGE, pool.view(slot, pages * PAGE), pool.address + slot)


def run(engine, ops, before=None):
    results = {}

    def on_done(i, result):
        assert i not in results
        results[i] = result

    engine.run(ops, on_done, before)
    return results


def fill(pool, pages):
    for i in range(pages):
        pool.view(i * PAGE, PAGE)[:] = os.urandom(PAGE)


@pytest.fixture
def slow(monkeypatch):
    """A pipe as a medium whose reads end when the test says so. preadv refuses pipes."""
    reader, writer = os.pipe()
    real = os.preadv

    def preadv(fd, views, offset):
        return os.readv(fd, views) if fd == reader else real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_bytes_that_were_written_come_back_at_every_size(engine, pool, fd):
    fill(pool, 120)
    sizes = [1, 2, 3, 10, 1, 30, 7, 66]  # pages, 120 in all
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    writes = [
        op(pool, fd, write=True, at=a, slot=a, pages=n) for a, n in zip(starts, sizes, strict=True)
    ]
    assert run(engine, writes) == {i: n * PAGE for i, n in enumerate(sizes)}
    reads = [
        op(pool, fd, write=False, at=a, slot=128 + a, pages=n)
        for a, n in zip(starts, sizes, strict=True)
    ]
    assert run(engine, reads) == {i: n * PAGE for i, n in enumerate(sizes)}
    assert pool.view(0, 120 * PAGE) == pool.view(128 * PAGE, 120 * PAGE)


def test_a_batch_larger_than_the_depth_ends_completely(engine, pool, fd):
    fill(pool, 100)
    ops = [op(pool, fd, write=True, at=i, slot=i) for i in range(100)]
    assert run(engine, ops) == dict.fromkeys(range(100), PAGE)
    assert run(engine, []) == {}


def test_an_op_that_before_refuses_is_neither_carried_out_nor_reported(engine, pool, fd):
    fill(pool, 4)
    ops = [op(pool, fd, write=True, at=i, slot=i) for i in range(4)]
    assert run(engine, ops, lambda i: i % 2 == 0) == {0: PAGE, 2: PAGE}
    data = op(pool, fd, write=False, at=0, slot=10, pages=4)
    run(engine, [data])
    assert data.view[:PAGE] == pool.view(0, PAGE)
    assert bytes(data.view[PAGE : 2 * PAGE]) == bytes(PAGE)
    assert data.view[2 * PAGE : 3 * PAGE] == pool.view(2 * PAGE, PAGE)


def test_a_read_past_the_end_reports_the_bytes_that_there_were(engine, pool, fd):
    os.ftruncate(fd, 6 * PAGE)
    ops = [
        op(pool, fd, write=False, at=4, slot=0, pages=4),
        op(pool, fd, write=False, at=20, slot=8),
        op(pool, fd, write=False, at=5, slot=9),
    ]
    assert run(engine, ops) == {0: 2 * PAGE, 1: 0, 2: PAGE}


def test_an_errno_belongs_to_its_op_only(engine, pool, fd):
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    ops = [op(pool, f, write=True, at=i, slot=i) for i, f in enumerate((fd, read_only, fd))]
    try:
        assert run(engine, ops) == {0: PAGE, 1: -errno.EBADF, 2: PAGE}
    finally:
        os.close(read_only)


@pytest.mark.parametrize("name", ENGINES)
def test_a_transfer_that_stops_short_is_continued(name, pool, fd, monkeypatch):
    monkeypatch.setattr(io_threads, "MAX_IO_BYTES", 2 * PAGE)
    monkeypatch.setattr(io_uring, "MAX_IO_BYTES", 2 * PAGE)
    engine = make(name, pool)
    fill(pool, 14)
    ops = [op(pool, fd, write=True, at=i * 7, slot=i * 7, pages=7) for i in range(2)]
    assert run(engine, ops) == {0: 7 * PAGE, 1: 7 * PAGE}
    assert run(engine, [op(pool, fd, write=False, at=0, slot=20, pages=14)]) == {0: 14 * PAGE}
    assert pool.view(0, 14 * PAGE) == pool.view(20 * PAGE, 14 * PAGE)
    engine.close()


def test_many_threads_at_once_get_their_own_bytes(engine, pool, tmp_path):
    callers = io_uring.MAX_RINGS + 3
    wrong = []

    def work(n, fd):
        mine = bytes([n]) * PAGE
        for slot in range(4):
            pool.view((n * 8 + slot) * PAGE, PAGE)[:] = mine
        for _ in range(20):
            out = [op(pool, fd, write=True, at=n * 4 + i, slot=n * 8 + i) for i in range(4)]
            back = [op(pool, fd, write=False, at=n * 4 + i, slot=n * 8 + 4 + i) for i in range(4)]
            done = [run(engine, out), run(engine, back)]
            if done != [dict.fromkeys(range(4), PAGE)] * 2 or any(o.view != mine for o in back):
                wrong.append((n, done))
            for o in back:
                o.view[:] = bytes(PAGE)

    fd = os.open(tmp_path / "many", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    threads = [threading.Thread(target=work, args=(n, fd)) for n in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert wrong == []


def test_what_a_callback_raises_waits_for_the_ops_in_flight(engine, pool, fd, slow):
    reader, writer = slow
    caught = []

    def on_done(i, result):
        raise LookupError(i)

    def caller():
        ops = [
            op(pool, reader, write=False, at=0, slot=0),
            op(pool, fd, write=False, at=0, slot=1),
        ]
        try:
            engine.run(ops, on_done)
        except LookupError as error:
            caught.append((error.args[0], bytes(pool.view(0, PAGE))))

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    os.write(writer, b"x" * PAGE)
    thread.join()
    assert caught == [(1, b"x" * PAGE)]


def test_signals_do_not_end_a_wait(engine, pool, slow):
    reader, writer = slow
    count = 0

    def handler(number, frame):
        nonlocal count
        count += 1
        if count == 5:
            os.write(writer, b"y" * PAGE)

    former = signal.signal(signal.SIGUSR1, handler)
    stop = threading.Event()

    def sender():
        while not stop.wait(0.01):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=sender)
    thread.start()
    try:
        results = run(engine, [op(pool, reader, write=False, at=0, slot=0)])
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, former)
    assert count >= 5
    assert results == {0: PAGE}
    assert pool.view(0, PAGE) == b"y" * PAGE


def test_an_exception_of_a_signal_handler_waits_for_the_ops_in_flight(engine, pool, slow):
    reader, writer = slow
    raised = 0

    def handler(number, frame):
        nonlocal raised
        raised += 1
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGUSR1, handler)

    def sender():
        while raised < 2:  # the second one comes while the first one waits
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)
        os.write(writer, b"z" * PAGE)

    thread = threading.Thread(target=sender)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(engine, [op(pool, reader, write=False, at=0, slot=0)])
    seen = bytes(pool.view(0, PAGE))
    thread.join()
    signal.signal(signal.SIGUSR1, former)
    assert seen == b"z" * PAGE


def test_ops_that_the_kernel_does_not_take_fail_and_never_start(pool, fd, monkeypatch):
    engine = make("io_uring", pool)
    fill(pool, 4)
    ops = [op(pool, fd, write=True, at=i, slot=i) for i in range(4)]
    monkeypatch.setattr(Ring, "enter", lambda self, wait: -errno.ENOMEM)
    assert run(engine, ops) == dict.fromkeys(range(4), -errno.ENOMEM)
    monkeypatch.undo()
    back = op(pool, fd, write=False, at=0, slot=10, pages=4)
    assert run(engine, [back]) == {0: 4 * PAGE}
    assert back.view == bytes(4 * PAGE)
    engine.close()


def test_where_the_kernel_gives_few_rings_callers_wait_for_one(pool, tmp_path, monkeypatch):
    made = []

    def scarce(entries):
        if len(made) == 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        made.append(Ring(entries))
        return made[-1]

    make("io_uring", pool).close()
    monkeypatch.setattr(io_uring, "Ring", scarce)
    engine = make("io_uring", pool)
    test_many_threads_at_once_get_their_own_bytes(engine, pool, tmp_path)
    assert len(made) == 2
    engine.close()


def test_close_gives_back_all_threads_and_fds(pool, tmp_path):
    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    started = count()
    for name in ENGINES:
        engine = make(name, pool)
        test_many_threads_at_once_get_their_own_bytes(engine, pool, tmp_path)
        assert count() != started
        engine.close()
        engine.close()
        assert count() == started, name


def test_close_waits_for_a_running_call(engine, pool, fd, slow):
    reader, writer = slow
    results = []
    ops = [op(pool, reader, write=False, at=0, slot=0)]
    ops += [op(pool, fd, write=False, at=i, slot=i) for i in range(1, 60)]  # most not begun
    runner = threading.Thread(target=lambda: results.append(run(engine, ops)))
    runner.start()
    time.sleep(0.1)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    os.write(writer, b"w" * PAGE)
    closer.join()
    runner.join()
    assert results == [dict.fromkeys(range(60), PAGE)]


def test_a_closed_engine_refuses(engine, pool, fd):
    engine.close()
    with pytest.raises(TierBroken, match="closed"):
        run(engine, [op(pool, fd, write=False, at=0, slot=0)])


def test_an_unknown_engine_is_answered_with_the_known_ones(pool):
    with pytest.raises(UnknownName, match="'spdk' is not one of io_uring, threads"):
        io_engine.make("spdk", pool, 4)


def test_registered_memory_is_cut_into_chunks_and_ops_across_two_go_plain(pool, fd, monkeypatch):
    monkeypatch.setattr(io_uring, "CHUNK_BYTES", 8 * PAGE)
    engine = make("io_uring", pool)
    other = AnonymousPool(4 * PAGE)  # memory that was never registered
    assert engine._buffer(pool.address + 9 * PAGE, PAGE) == 1
    assert engine._buffer(pool.address + 7 * PAGE, 2 * PAGE) == -1
    assert engine._buffer(other.address, PAGE) == -1
    fill(pool, 20)
    fill(other, 4)
    ops = [op(pool, fd, write=True, at=0, slot=0, pages=20)]
    ops.append(op(other, fd, write=True, at=20, slot=0, pages=4))
    assert run(engine, ops) == {0: 20 * PAGE, 1: 4 * PAGE}
    back = op(pool, fd, write=False, at=0, slot=30, pages=24)
    assert run(engine, [back]) == {0: 24 * PAGE}
    assert back.view[: 20 * PAGE] == pool.view(0, 20 * PAGE)
    assert back.view[20 * PAGE :] == other.view(0, 4 * PAGE)
    engine.close()
    del back, ops
    other.close()


def test_without_memlock_io_uring_works_unregistered_and_says_so(tmp_path, pool):
    """In a process of an ordinary user, whose limit holds; root's own is ignored."""
    make("io_uring", pool).close()
    script = textwrap.dedent("""
        import os, resource, sys
        from anonymous_pool import AnonymousPool
        from tiered_kv.tiers import io_engine, io_uring
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        if os.geteuid() == 0:
            os.setgid(65534), os.setuid(65534)
        pool = AnonymousPool(1 << 20)
        engine = io_engine.make("io_uring", pool, 4)
        print(engine.describe())
        pool.view(0, 4096)[:] = b"q" * 4096
        for write, slot in ((True, 0), (False, 4096)):
            view = pool.view(slot, 4096)
            op = io_engine.IoOp(write, fd, 0, view, pool.address + slot)
            engine.run([op], lambda i, result: print(result))
        print(pool.view(4096, 4096) == b"q" * 4096)
    """)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "f")],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    assert "plain buffers (cannot pin the pool: Cannot allocate memory)" in lines[0], done.stderr
    assert lines[1:] == ["4096", "4096", "True"]


def test_a_pool_that_may_be_pinned_is_registered(pool):
    if os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 8 << 20:
        pytest.skip("this user may not pin memory")
    engine = make("io_uring", pool)
    assert engine.describe() == "io_uring, depth 4, registered buffers"
    engine.close()
