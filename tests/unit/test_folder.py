import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_kv.errors import FolderInUse, TierBroken
from tiered_kv.folder import Folder

ROOT = Path(__file__).parents[2]


def test_a_new_folder_gets_an_identity_of_its_own(tmp_path):
    one, two = Folder.open(tmp_path / "a" / "b"), Folder.open(tmp_path / "c")
    assert len(one.node_id) == 32
    assert one.node_id != two.node_id
    assert one.incarnation == two.incarnation == 1
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    one.close()
    two.close()


def test_each_opening_is_a_new_incarnation_of_the_same_node(tmp_path):
    lives = []
    for _ in range(3):
        folder = Folder.open(tmp_path)
        lives.append((folder.node_id, folder.incarnation))
        assert json.loads((tmp_path / "node.json").read_text())["incarnation"] == lives[-1][1]
        folder.close()
    assert {node for node, _ in lives} == {lives[0][0]}
    assert [n for _, n in lives] == [1, 2, 3]


def test_a_second_service_is_refused_with_folder_and_holder(tmp_path):
    folder = Folder.open(tmp_path)
    with pytest.raises(FolderInUse) as caught:
        Folder.open(tmp_path)
    for part in (str(tmp_path), f"pid {os.getpid()}", folder.node_id):
        assert part in str(caught.value)
    assert json.loads((tmp_path / "node.json").read_text())["incarnation"] == 1
    folder.close()
    again = Folder.open(tmp_path)
    assert again.incarnation == 2
    again.close()


def test_the_lock_ends_with_its_process(tmp_path):
    script = (
        "import sys, os, signal, pathlib\n"
        "from tiered_kv.folder import Folder\n"
        "folder = Folder.open(pathlib.Path(sys.argv[1])); print(folder.node_id, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    node_id = child.stdout.readline().strip()
    with pytest.raises(FolderInUse, match=f"pid {child.pid}, node {node_id}"):
        Folder.open(tmp_path)
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    folder = Folder.open(tmp_path)
    assert (folder.node_id, folder.incarnation) == (node_id, 2)
    folder.close()


def test_a_lock_that_lost_its_name_while_it_was_taken_is_no_lock(tmp_path, monkeypatch):
    Folder.open(tmp_path).close()
    real, seen = fcntl.flock, []

    def flock(fd, how):
        if not seen:
            (tmp_path / "LOCK").unlink()  # by somebody who cleans up, between open and flock
        seen.append(fd)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = Folder.open(tmp_path)
    assert len(seen) == 2
    assert folder.intact()
    with pytest.raises(FolderInUse):
        Folder.open(tmp_path)
    folder.close()


DAMAGE = {
    "empty": b"",
    "garbage": os.urandom(100),
    "no object": b"[1, 2]",
    "no incarnation": b'{"node_id": "00000000000000000000000000000001"}',
    "text for a number": b'{"node_id": "00000000000000000000000000000001", "incarnation": "7"}',
    "zero": b'{"node_id": "00000000000000000000000000000001", "incarnation": 0}',
    "no id": b'{"node_id": "me", "incarnation": 7}',
    "number for an id": b'{"node_id": 7, "incarnation": 7}',
    "path in an id": b'{"node_id": "../../../../../../../../../../etc", "incarnation": 7}',
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_identity_is_kept_aside_and_replaced(tmp_path, text):
    (tmp_path / "node.json").write_bytes(text)
    folder = Folder.open(tmp_path)
    assert folder.incarnation == 1
    assert len(folder.node_id) == 32
    assert (tmp_path / "node.json.damaged-1").read_bytes() == text
    assert json.loads((tmp_path / "node.json").read_text())["node_id"] == folder.node_id
    folder.close()
    (tmp_path / "node.json").write_bytes(text)
    Folder.open(tmp_path).close()
    assert (tmp_path / "node.json.damaged-2").read_bytes() == text


def test_a_half_written_identity_is_never_read(tmp_path):
    folder = Folder.open(tmp_path)
    folder.close()
    (tmp_path / "node.json.tmp").write_bytes(b'{"node')  # killed before the rename
    again = Folder.open(tmp_path)
    assert (again.node_id, again.incarnation) == (folder.node_id, 2)
    again.close()


def test_a_folder_is_intact_until_it_is_removed_or_replaced(tmp_path):
    path = tmp_path / "f"
    folder = Folder.open(path)
    assert folder.intact()
    shutil.rmtree(path)
    assert not folder.intact()
    path.mkdir()
    assert not folder.intact()
    replacement = Folder.open(path)
    assert replacement.intact()
    assert not folder.intact()
    folder.close()
    replacement.close()


def test_a_folder_whose_lock_was_replaced_is_not_intact(tmp_path):
    folder = Folder.open(tmp_path)
    (tmp_path / "LOCK").unlink()
    assert not folder.intact()
    other = Folder.open(tmp_path)
    assert other.intact()
    assert not folder.intact()
    folder.close()
    other.close()


def test_a_closed_folder_is_not_intact_and_closes_again(tmp_path):
    folder = Folder.open(tmp_path)
    folder.close()
    folder.close()
    assert not folder.intact()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "f").write_text("")
    for path in (tmp_path / "f", tmp_path / "f" / "g"):
        with pytest.raises(TierBroken, match=str(path)):
            Folder.open(path)


def test_no_descriptor_is_left_after_a_failure(tmp_path):
    folder = Folder.open(tmp_path)
    (tmp_path / "file").write_text("")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FolderInUse):
        Folder.open(tmp_path)
    with pytest.raises(TierBroken):
        Folder.open(tmp_path / "file")
    assert os.listdir("/proc/self/fd") == before
    folder.close()
