import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from other_process import Child, shm_folder

from tiered_kv.errors import BadInput
from tiered_kv.liveness import hold, is_alive, private_folder, remove_if_dead

HOLDER = """
import sys
from pathlib import Path
from tiered_kv.liveness import hold
alive = hold(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
sys.stdin.readline()
"""

FORKING_HOLDER = """
import os, sys
from pathlib import Path
from tiered_kv.liveness import hold
alive = hold(Path(sys.argv[1]), "a")
if os.fork() == 0:
    alive.close()
    print("forked", flush=True)
    sys.stdin.readline()
    os._exit(0)
os.waitid(os.P_ALL, 0, os.WEXITED)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with shm_folder() as path:
        yield path


def test_a_holder_is_alive_until_it_closes(folder):
    assert not is_alive(folder, "a")
    alive = hold(folder, "a")
    assert is_alive(folder, "a")
    assert str(os.getpid()) in (folder / "a.alive").read_text()
    alive.close()
    assert not is_alive(folder, "a")
    assert list(folder.iterdir()) == []


def test_a_killed_holder_is_dead_and_its_name_can_be_held_again(folder):
    with Child(HOLDER, folder, "a") as child:
        assert child.word() == "held"
        assert is_alive(folder, "a")
        child.kill()
        assert (folder / "a.alive").exists()
        assert not is_alive(folder, "a")
        again = hold(folder, "a")
        assert is_alive(folder, "a")
        again.close()


def test_a_stopped_holder_is_alive(folder):
    with Child(HOLDER, folder, "a") as child:
        assert child.word() == "held"
        child.stop()
        assert is_alive(folder, "a")
        assert not remove_if_dead(folder / "a.alive")


def test_a_forked_child_neither_prolongs_nor_ends_the_life_of_its_parent(folder):
    with Child(FORKING_HOLDER, folder) as parent:
        assert parent.word() == "forked"  # and the child has called close
        assert is_alive(folder, "a")
        parent.kill()
        assert not is_alive(folder, "a")
        parent.say("")  # ends the forked child, which still reads the pipe


def test_probing_does_not_take_the_lock_away(folder):
    alive = hold(folder, "a")
    answers = [is_alive(folder, "a") for _ in range(100)]
    assert answers == [True] * 100
    alive.close()


def test_two_probes_do_not_take_each_other_for_the_owner(folder):
    (folder / "a.alive").touch()
    with open(folder / "a.alive") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not is_alive(folder, "a")


def test_a_name_held_by_a_live_process_is_refused_and_stays_with_it(folder):
    first = hold(folder, "a")
    text = (folder / "a.alive").read_text()
    with pytest.raises(BadInput, match=r"a\.alive.*live process"):
        hold(folder, "a")
    assert is_alive(folder, "a")
    assert (folder / "a.alive").read_text() == text
    first.close()


def test_a_late_close_does_not_remove_the_file_of_a_successor(folder):
    first = hold(folder, "a")
    first.close()
    second = hold(folder, "a")
    first.close()
    assert is_alive(folder, "a")
    second.close()


def test_a_remover_that_comes_late_leaves_the_successor_alone(folder, monkeypatch):
    # The race of the module's docstring: the leftover is replaced after it was opened.
    (folder / "a.alive").touch()
    flock = fcntl.flock
    successors = []

    def replaced_before_the_lock(fd, how):
        monkeypatch.undo()
        successors.append(hold(folder, "a"))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", replaced_before_the_lock)
    assert not remove_if_dead(folder / "a.alive")
    assert is_alive(folder, "a")
    successors[0].close()


def test_of_many_removers_one_removes(folder):
    path = folder / "a.alive"
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            path.touch()
            removed = list(pool.map(remove_if_dead, [path] * 4))
            assert removed.count(True) == 1
            assert not path.exists()


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "../a", "a\n", "a\0", "é", "a" * 201])
def test_a_name_that_could_leave_the_folder_is_refused(folder, name):
    with pytest.raises(BadInput, match="is not a name"):
        hold(folder, name)
    with pytest.raises(BadInput, match="is not a name"):
        is_alive(folder, name)
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_may_write_to_is_refused(folder):
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    with pytest.raises(BadInput, match="drwxrwxrwx"):
        private_folder(folder / "open")


def test_a_folder_that_is_a_link_is_refused(folder):
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    with pytest.raises(BadInput, match="link"):
        private_folder(folder / "link")


def test_a_new_folder_is_for_its_user_only(folder):
    assert private_folder(folder / "x").stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_file_is_not_followed(folder):
    (folder / "target").touch()
    (folder / "a.alive").symlink_to(folder / "target")
    with pytest.raises(BadInput, match=r"a\.alive"):
        is_alive(folder, "a")
    assert (folder / "target").exists()
