import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tiered_kv.errors import BadInput, DoesNotFit, FolderInUse
from tiered_kv.tiers import stripes as module
from tiered_kv.tiers.stripes import Stripes

MB = 1 << 20
ROOT = Path(__file__).parents[2]


def allocated(file):
    return file.stat().st_blocks * 512


def test_each_folder_gets_a_file_with_all_its_space(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b" / "c"]
    stripes = Stripes.open(folders, 2 * MB)
    assert [f.parent for f in stripes.files] == folders
    for file in stripes.files:
        assert file.stat().st_size == 2 * MB
        assert allocated(file) >= 2 * MB
    assert stripes.allocated_bytes == 4 * MB
    assert stripes.intact()
    stripes.close()
    stripes.close()
    assert not stripes.intact()


def test_reopening_extends_nothing_and_keeps_the_bytes(tmp_path, monkeypatch):
    Stripes.open([tmp_path], MB).close()
    (tmp_path / "blocks.data").write_bytes(b"k" * MB)

    def fallocate(*args):
        raise AssertionError("extended a file of the right size")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    stripes = Stripes.open([tmp_path], MB, free_floor_bytes=1 << 60)  # nothing more is wanted
    assert stripes.allocated_bytes == 0
    assert stripes.files[0].read_bytes() == b"k" * MB
    stripes.close()


def test_progress_counts_up_to_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_STEP_BYTES", MB)
    Stripes.open([tmp_path / "a"], MB).close()
    seen = []
    folders = [tmp_path / "a", tmp_path / "b"]
    Stripes.open(folders, 3 * MB, progress=lambda *p: seen.append(p)).close()
    assert seen == [(n * MB, 5 * MB) for n in range(1, 6)]


def test_a_truncated_file_is_extended_with_zeros_and_an_intact_one_says_so(tmp_path):
    stripes = Stripes.open([tmp_path], 2 * MB)
    file = stripes.files[0]
    file.write_bytes(b"x" * 2 * MB)
    os.truncate(file, MB)
    assert not stripes.intact()
    stripes.close()
    stripes = Stripes.open([tmp_path], 2 * MB)
    assert stripes.allocated_bytes == MB
    assert file.read_bytes() == b"x" * MB + bytes(MB)
    stripes.close()


def test_a_smaller_capacity_gives_space_back(tmp_path):
    Stripes.open([tmp_path], 4 * MB).close()
    stripes = Stripes.open([tmp_path], MB)
    assert stripes.files[0].stat().st_size == MB
    stripes.close()


def test_the_free_floor_is_kept_and_the_numbers_are_told(tmp_path):
    volume = os.statvfs(tmp_path)
    free = volume.f_bavail * volume.f_frsize
    floor = free - MB  # less than two stripes fit above it; other users may take more meanwhile
    with pytest.raises(DoesNotFit) as caught:
        Stripes.open([tmp_path / "a", tmp_path / "b"], 8 * MB, free_floor_bytes=floor)
    assert str(16 * MB) in str(caught.value)  # both stripes are on one device
    assert str(floor) in str(caught.value)
    assert (tmp_path / "a" / "blocks.data").stat().st_size == 0
    Stripes.open([tmp_path / "a"], 8 * MB, free_floor_bytes=free // 2).close()


def test_a_failed_allocation_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_STEP_BYTES", MB)
    Stripes.open([tmp_path], MB).close()
    real, calls = os.posix_fallocate, []

    def fallocate(fd, offset, nbytes):
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(DoesNotFit, match="No space left"):
        Stripes.open([tmp_path], 8 * MB)
    assert (tmp_path / "blocks.data").stat().st_size == MB


def test_a_folder_that_is_named_twice_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "twice")
    for other in (tmp_path / "twice", tmp_path / "link"):
        with pytest.raises(BadInput, match="named twice"):
            Stripes.open([tmp_path / "twice", other], MB)


def test_writes_of_a_killed_predecessor_are_waited_for(tmp_path):
    """The kernel keeps its file open, and locked, until they have ended."""
    former = Stripes.open([tmp_path], MB)
    threading.Timer(0.3, former.close).start()
    stripes = Stripes.open([tmp_path], MB)
    assert not former.intact()
    stripes.close()


def test_a_file_is_locked_against_other_services(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.1)
    stripes = Stripes.open([tmp_path], MB)
    with pytest.raises(FolderInUse, match=f"{tmp_path}/blocks.data"):
        Stripes.open([tmp_path / "other", tmp_path], MB)
    script = (
        "import sys, pathlib\nfrom tiered_kv.tiers import stripes\n"
        "stripes._LOCK_WAIT_S = 0.1\n"
        "stripes.Stripes.open([pathlib.Path(sys.argv[1])], 1 << 20)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert (
        "FolderInUse"
        in subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stderr
    )
    stripes.close()
    assert subprocess.run(command, env=env, timeout=60).returncode == 0


def test_a_size_that_o_direct_cannot_use_is_refused(tmp_path):
    for size in (0, 4095, MB + 512):
        with pytest.raises(BadInput, match=str(size)):
            Stripes.open([tmp_path], size)


def refuse_at_open(monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


def refuse_at_first_read(monkeypatch):
    def refusing(fd, buffers, offset):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "preadv", refusing)


@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_at_first_read])
def test_a_file_system_without_o_direct_is_used_through_the_cache(tmp_path, monkeypatch, refuse):
    refuse(monkeypatch)
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: advised.append(args))
    stripes = Stripes.open([tmp_path], MB)
    assert "page cache (O_DIRECT refused)" in stripes.describe()
    assert str(tmp_path) in stripes.describe()
    stripes.settle(stripes.fds[0], 8192, 4096)
    assert advised == [(stripes.fds[0], 8192, 4096, os.POSIX_FADV_DONTNEED)]
    stripes.close()


def test_a_file_with_o_direct_is_left_to_itself(tmp_path, monkeypatch):
    stripes = Stripes.open([tmp_path], MB)
    if "refused" in stripes.describe():
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: pytest.fail("advised"))
    stripes.settle(stripes.fds[0], 0, 4096)
    assert stripes.describe() == f"1 x {MB} bytes, O_DIRECT"
    stripes.close()
