"""Neighbours are processes that see the same shared memory folder."""

import os

import pytest

from tiered_kv.errors import BadInput
from tiered_kv.hosts import host_identity


def test_the_same_folder_by_any_path_is_the_same_host(shm_folder, tmp_path):
    (shm_folder / "kv").mkdir(mode=0o700)
    same = shm_folder / "kv" / ".." / "kv"
    assert host_identity(shm_folder / "kv") == host_identity(same)


def test_another_folder_is_another_host(shm_folder):
    assert host_identity(shm_folder / "a") != host_identity(shm_folder / "b")


def test_a_folder_that_others_may_write_to_is_refused(shm_folder):
    open_to_all = shm_folder / "open"
    open_to_all.mkdir()
    os.chmod(open_to_all, 0o777)
    with pytest.raises(BadInput, match="no other user may write to"):
        host_identity(open_to_all)
