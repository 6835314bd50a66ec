"""What the NVMe tier does when the disk, the folder, the index or the process fails for real.

Mounts are made in a private mount namespace of a child process: `unshare -m` as root, and
`unshare -Urm` (which makes an ordinary user root of a namespace of its own) for everybody else.
"""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
from anonymous_pool import AnonymousPool
from nvme_kit import CAPACITY, MB, NBYTES, block, content, get, open_tier, put, right

from tiered_kv.errors import FolderInUse, TierBroken
from tiered_kv.folder import Folder
from tiered_kv.tiers import stripes
from tiered_kv.types import BlockKey, Done, Fingerprint, Located, Why

pytestmark = pytest.mark.fault
ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, signal, sys
from pathlib import Path
from anonymous_pool import AnonymousPool
from nvme_kit import *
from tiered_kv.errors import *
from tiered_kv.folder import Folder
from tiered_kv.tiers import stripes
from tiered_kv.types import *
pool = AnonymousPool(8 * MB)
where = Path(sys.argv[1])
"""


@pytest.fixture
def pool():
    pool = AnonymousPool(8 * MB)
    yield pool
    pool.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "node"


class Service:
    """An opened folder with its tier."""

    def __init__(self, path, pool, **options):
        self.folder = Folder.open(path)
        try:
            self.tier = open_tier(self.folder, pool, **options)
        except BaseException:
            self.folder.close()
            raise

    def close(self):
        self.tier.close()
        self.folder.close()


@pytest.fixture
def service(path, pool):
    service = Service(path, pool)
    yield service
    service.close()


def child(script, *args, command=()):
    """Run a script in a process of its own; returns what it printed."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(
        [*command, sys.executable, "-c", PRELUDE + textwrap.dedent(script), *map(str, args)],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )


@cache
def namespace():
    """The command that gives a child mounts of its own."""
    command = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-Urm")
    made = subprocess.run([*command, "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"{' '.join(command)} is refused here: {made.stderr.strip()}")
    return command


def flip(file, at):
    with open(file, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 4]))
        os.fsync(f.fileno())


def test_a_flipped_bit_costs_its_own_block_only(service, path, pool):
    _, sealed = put(service.tier, pool, [block(n) for n in range(10)])
    service.tier.flush()
    flip(path / "blocks.data", sealed[4].slot + NBYTES - 1)
    outcomes, found = get(service.tier, pool, sealed)
    assert right(sealed, outcomes, found) == [n != 4 for n in range(10)]
    assert outcomes[4].why is Why.CORRUPT
    assert f"slot {sealed[4].slot}" in outcomes[4].detail


def test_two_blocks_that_changed_places_are_both_corrupt(service, pool):
    _, sealed = put(service.tier, pool, [block(n) for n in range(3)])
    swapped = [sealed[0]._replace(slot=sealed[1].slot), sealed[1]._replace(slot=0), sealed[2]]
    outcomes, found = get(service.tier, pool, swapped)
    assert right(swapped, outcomes, found) == [False, False, True]


def test_a_truncated_data_file_costs_what_was_cut_off(service, path, pool):
    _, sealed = put(service.tier, pool, [block(n) for n in range(10)])
    cut = sealed[6].slot + NBYTES // 2
    os.truncate(path / "blocks.data", cut)
    assert not service.tier.healthy()
    outcomes, found = get(service.tier, pool, sealed)
    assert right(sealed, outcomes, found) == [n < 6 for n in range(10)]
    assert {o.why for o in outcomes[6:]} == {Why.IO_ERROR}
    assert f"ended after {NBYTES // 2} of {NBYTES} bytes" in outcomes[6].detail
    service.close()
    again = Service(path, pool)
    assert again.tier.healthy()
    assert again.tier.restore() == sealed
    outcomes, found = get(again.tier, pool, sealed)
    assert right(sealed, outcomes, found) == [n < 6 for n in range(10)]
    assert {o.why for o in outcomes[6:]} == {Why.CORRUPT}
    outcomes, rewritten = put(again.tier, pool, sealed)
    assert rewritten == sealed
    outcomes, found = get(again.tier, pool, sealed)
    assert all(right(sealed, outcomes, found))
    again.close()


def cut(index):
    os.truncate(index, index.stat().st_size // 3)


def scribble(index):
    index.write_bytes(os.urandom(index.stat().st_size))


def delete(index):
    index.unlink()


@pytest.mark.parametrize("damage", [cut, scribble, delete])
def test_a_lost_index_costs_warmth_only(service, path, pool, damage):
    _, sealed = put(service.tier, pool, [block(n) for n in range(30)])
    service.tier.flush()
    service.close()
    damage(path / "index.db")
    again = Service(path, pool)
    assert again.tier.opened.fresh_because is not None
    assert again.tier.restore() == []
    outcomes, found = get(again.tier, pool, sealed)  # data was not touched
    assert all(right(sealed, outcomes, found))
    outcomes, rewritten = put(again.tier, pool, [block(n) for n in range(30, 60)])
    assert all(isinstance(o, Done) for o in outcomes)
    again.close()
    again = Service(path, pool)
    assert again.tier.restore() == rewritten
    again.close()


def test_every_single_byte_of_the_index_can_be_wrong(service, path, pool):
    """Whatever a damaged index says, a block arrives with its own bytes or not at all."""
    _, sealed = put(service.tier, pool, [block(n) for n in range(6)])
    service.tier.flush()
    service.close()
    index = path / "index.db"
    whole = index.read_bytes()
    believed = 0
    for at in range(0, len(whole), 97):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        for log in path.glob("index.db-*"):
            log.unlink()
        again = Service(path, pool)
        rows = again.tier.restore()
        assert set(rows) <= set(sealed)
        outcomes, found = get(again.tier, pool, rows)
        right(rows, outcomes, found)
        believed += len(rows)
        again.close()
    assert believed > 0


def test_a_second_process_is_refused_and_the_first_goes_on(service, path, pool):
    _, sealed = put(service.tier, pool, [block(1)])
    done = child("Folder.open(where)", path)
    assert "FolderInUse" in done.stderr
    assert f"pid {os.getpid()}, node {service.folder.node_id}" in done.stderr
    outcomes, found = get(service.tier, pool, sealed)
    assert all(right(sealed, outcomes, found))
    assert service.tier.healthy()


def test_two_folders_cannot_share_a_device_folder(service, path, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(stripes, "_LOCK_WAIT_S", 0.1)
    with pytest.raises(FolderInUse, match="is in use by a live service"):
        Service(tmp_path / "other", pool, paths=[path])
    Service(tmp_path / "other", pool).close()  # and nothing was left locked


def test_a_read_only_folder_is_refused_with_its_path(path):
    Folder.open(path).close()
    done = child(
        """
        import subprocess
        subprocess.run(["mount", "--bind", where, where], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", where], check=True)
        try:
            Folder.open(where)
        except TierBroken as error:
            print(error)
        """,
        path,
        command=namespace(),
    )
    assert f"{path}: Read-only file system" in done.stdout, done.stderr
    again = Folder.open(path)
    assert again.incarnation == 2  # the refused opening was no life
    again.close()


def test_a_read_only_device_folder_is_refused_with_its_path(path, tmp_path):
    device = tmp_path / "device"
    device.mkdir()
    done = child(
        """
        import subprocess
        device = Path(sys.argv[2])
        subprocess.run(["mount", "--bind", device, device], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", device], check=True)
        folder = Folder.open(where)
        try:
            open_tier(folder, pool, paths=[device])
        except TierBroken as error:
            print(error)
        """,
        path,
        device,
        command=namespace(),
    )
    assert f"{device}/blocks.data: Read-only file system" in done.stdout, done.stderr


def test_a_folder_without_permission_is_refused_with_its_path(path):
    """As an ordinary user: root may write everywhere."""
    path.mkdir()
    path.chmod(0o555)
    for parent in path.parents:
        if parent.stat().st_uid == os.geteuid() and parent.name.startswith("pytest"):
            parent.chmod(parent.stat().st_mode | 0o055)
    for parent in list(path.parents)[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    done = child(
        """
        if os.geteuid() == 0:
            os.setgid(65534), os.setuid(65534)
        try:
            Folder.open(where)
        except TierBroken as error:
            print(error)
        """,
        path,
    )
    assert f"{path}: Permission denied" in done.stdout, done.stderr


TMPFS = """
import subprocess
where.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%dk" % (int(sys.argv[2]) // 1024), "tmpfs",
                where], check=True)
def fill():
    with open(where / "filler", "wb", buffering=0) as filler:
        for piece in (1 << 20, 4096, 1):
            try:
                while True:
                    filler.write(bytes(piece))
            except OSError as error:
                assert error.errno == 28, error
"""


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(path):
    done = child(
        TMPFS
        + """
        folder = Folder.open(where)
        try:
            open_tier(folder, pool)
        except DoesNotFit as error:
            print(error)
        print(sorted(f.stat().st_size for f in where.glob("*.data")))
        """.replace("\n        ", "\n"),
        path,
        4 * MB,
        command=namespace(),
    )
    assert f"{path}/blocks.data: {CAPACITY} bytes more are wanted" in done.stdout, done.stderr
    assert f"{MB} must stay free" in done.stdout
    assert done.stdout.splitlines()[-1] == "[0]"


def test_a_folder_on_a_full_disk_is_refused(path):
    done = child(
        TMPFS
        + """
        fill()
        try:
            Folder.open(where)
        except DoesNotFit as error:
            print(error)
        """.replace("\n        ", "\n"),
        path,
        MB,
        command=namespace(),
    )
    assert f"{path}: No space left on device" in done.stdout, done.stderr


def test_a_disk_that_fills_up_fails_writes_until_there_is_room_again(path):
    done = child(
        TMPFS
        + """
        folder = Folder.open(where)
        tier = open_tier(folder, pool)
        outcomes, first = put(tier, pool, [block(n) for n in range(8)])
        assert all(isinstance(o, Done) for o in outcomes)
        tier.flush()
        fill()
        recorded = list(first)
        for n in range(8, 64):  # what the log still has room for is recorded, then nothing is
            outcomes, sealed = put(tier, pool, [block(n)])
            if isinstance(outcomes[0], Failed):
                break
            recorded += sealed
        print(outcomes[0].why.value, outcomes[0].detail)
        try:
            tier.drop([first[0].key])
            recorded.remove(first[0])
        except TierBroken as error:
            print("drop:", error)
        outcomes, found = get(tier, pool, recorded)
        print("read", all(right(recorded, outcomes, found)), tier.healthy())
        assert tier.restore() == recorded
        (where / "filler").unlink()
        outcomes, sealed = put(tier, pool, [block(n) for n in range(40, 50)])
        print("again", all(isinstance(o, Done) for o in outcomes))
        tier.flush()
        assert tier.restore() == recorded + sealed
        tier.close()
        tier = open_tier(folder, pool)
        assert tier.restore() == recorded + sealed
        outcomes, found = get(tier, pool, recorded + sealed)
        print("reopened", all(right(recorded + sealed, outcomes, found)))
        """.replace("\n        ", "\n"),
        path,
        24 * MB,
        command=namespace(),
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].startswith("io_error cannot record blocks in")
    assert "full" in lines[0]
    assert [line for line in lines if not line.startswith("drop:")][1:] == [
        "read True True",
        "again True",
        "reopened True",
    ]


def test_a_folder_that_vanished_gives_no_wrong_byte_and_is_not_healthy(service, path, pool):
    _, sealed = put(service.tier, pool, [block(n) for n in range(10)])
    shutil.rmtree(path)
    assert not service.tier.healthy()
    outcomes, found = get(service.tier, pool, sealed)
    right(sealed, outcomes, found)
    with pytest.raises(TierBroken, match=f"{path} was removed or replaced"):
        put(service.tier, pool, [block(11)])
    with pytest.raises(TierBroken, match=f"{path} were removed or replaced"):
        service.tier.probe()
    other = Service(path, pool)  # somebody else begins anew in the same place
    assert other.folder.node_id != service.folder.node_id
    assert other.tier.restore() == []
    _, theirs = put(other.tier, pool, [block(n, slot=(9 - n) * NBYTES) for n in range(10)])
    for tier, blocks in ((service.tier, sealed), (other.tier, theirs)):
        outcomes, found = get(tier, pool, blocks)
        assert all(right(blocks, outcomes, found))
    assert not service.tier.healthy()
    assert other.tier.healthy()
    other.close()


VICTIM = """
    phase, engine_name = sys.argv[2:]
    folder = Folder.open(where)
    try:
        tier = open_tier(folder, pool, engine=engine_name)
    except TierBroken as error:
        sys.exit(f"refused: {error}")
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)
    _, first = put(tier, pool, [block(n) for n in range(16)])
    real_run, real_put = tier._engine.run, tier._files.index.put

    def run_and_die(ops, on_done, before=None):
        ended = []
        def counting(i, result):
            on_done(i, result)
            ended.append(i)
            if len(ended) == 5:
                die()
        real_run(ops, counting, before)

    def die_before(blocks):
        die()

    def die_after(blocks):
        real_put(blocks)
        die()

    if phase == "data":
        tier._engine.run = run_and_die
    else:
        tier._files.index.put = {"before rows": die_before, "after rows": die_after}[phase]
    for b in first:
        print(b.key.hex(), b.slot, b.checksum, flush=True)
    put(tier, pool, [block(100 + n, slot=n * NBYTES) for n in range(8, 24)])
    print("survived")
"""


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize("phase", ["data", "before rows", "after rows"])
def test_a_killed_writer_leaves_rows_of_what_was_committed_only(path, pool, phase, engine):
    """16 blocks are committed; a second batch, half of it over their slots, is cut off."""
    done = child(VICTIM, path, phase, engine)
    if "refused" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == -signal.SIGKILL, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    layout = Fingerprint(b"layout-of-a-test")
    first = [
        Located(BlockKey(bytes.fromhex(key)), None, int(slot), NBYTES, layout, int(sum_))
        for key, slot, sum_ in lines
    ]
    assert len(first) == 16
    service = Service(path, pool)
    assert service.folder.incarnation == 2
    assert service.tier.opened.fresh_because is None
    rows = service.tier.restore()
    outcomes, found = get(service.tier, pool, rows)
    arrived = right(rows, outcomes, found)
    if phase == "after rows":
        assert rows[:8] == first[:8]
        assert [int.from_bytes(row.key, "big") for row in rows[8:]] == list(range(108, 124))
        assert all(arrived)
    else:
        assert rows == first
        assert all(arrived[:8])
        assert {o.why for o, ok in zip(outcomes, arrived, strict=True) if not ok} <= {Why.CORRUPT}
        assert not all(arrived)  # the second batch was under way in these slots
    for b in rows:
        pool.view(0, NBYTES)[:] = content(b.key)
    outcomes, _ = put(service.tier, pool, rows)  # and all of it can be written anew
    assert all(isinstance(o, Done) for o in outcomes)
    service.close()
