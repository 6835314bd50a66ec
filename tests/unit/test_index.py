import os
import sqlite3
import threading

import pytest

from tiered_kv.errors import BadInput, TierBroken
from tiered_kv.tiers.index import Index
from tiered_kv.tiers.index_file import Geometry
from tiered_kv.types import BlockKey, Fingerprint, Located

GEOMETRY = Geometry(slab_bytes=1 << 20, stripes=1, capacity_bytes=8 << 20)
LAYOUT = Fingerprint(b"L" * 16)


def block(n, slot=None, checksum=None):
    return Located(
        BlockKey(n.to_bytes(16, "big")),
        BlockKey((n - 1).to_bytes(16, "big")) if n else None,
        n * 4096 if slot is None else slot,
        4096,
        LAYOUT,
        (1 << 64) - 1 - n if checksum is None else checksum,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "index.db"


@pytest.fixture
def index(path):
    index = Index.open(path, GEOMETRY)
    yield index
    index.close()


def reopen(index):
    index.close()
    return Index.open(index.path, GEOMETRY)


def test_rows_come_back_whole_in_the_order_they_were_written(index):
    blocks = [
        block(n, slot=(100 - n) * 4096, checksum=c)
        for n, c in enumerate((0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1))
    ]
    index.put(blocks[:3])
    index.put(blocks[3:])
    assert index.load() == blocks
    index = reopen(index)
    assert index.load() == blocks
    assert index.opened.fresh_because is None
    index.put([block(50)])
    assert index.load() == [*blocks, block(50)]
    index.close()


def test_a_reused_slot_or_key_replaces_the_old_row(index):
    index.put([block(1), block(2), block(3)])
    index.put([block(4, slot=block(1).slot)])  # the slot of 1
    index.put([block(2, slot=9 * 4096)])  # the key of 2 elsewhere
    index.put([block(3, slot=block(4).slot - 3 * 4096)])  # key of 3 in the slot of 4
    assert index.load() == [block(2, slot=9 * 4096), block(3, slot=4096)]


def test_dropped_rows_are_gone_and_unknown_keys_do_not_matter(index):
    index.put([block(n) for n in range(4)])
    index.drop([block(1).key, block(3).key, block(77).key])
    assert index.load() == [block(0), block(2)]
    index = reopen(index)
    assert index.load() == [block(0), block(2)]
    index.close()


def test_a_batch_is_recorded_wholly_or_not_at_all(index):
    index.put([block(1)])
    unsealed = block(3)._replace(checksum=None)
    with pytest.raises(BadInput, match="has no checksum"):
        index.put([block(2), unsealed])
    assert index.load() == [block(1)]
    index.put([block(2)])
    assert index.load() == [block(1), block(2)]


@pytest.mark.parametrize(
    "other",
    [
        Geometry(2 << 20, 1, 8 << 20),
        Geometry(1 << 20, 2, 8 << 20),
        Geometry(1 << 20, 1, 4 << 20),
    ],
)
def test_rows_of_another_geometry_are_dropped_and_counted_and_sessions_stay(index, other):
    index.put([block(n) for n in range(5)])
    index.put_sessions([(b"s", b"doc", 1.0)])
    index.close()
    index = Index.open(index.path, other)
    assert index.opened.dropped_rows == 5
    assert index.load() == []
    assert index.all_sessions() == [(b"s", b"doc", 1.0)]
    index.close()
    index = Index.open(index.path, other)
    assert index.opened.dropped_rows == 0
    index.close()


def test_sessions_are_replaced_dropped_and_listed_by_age(index):
    odd = (bytes(range(256)), os.urandom(5000), 3.25)
    index.put_sessions([odd, (b"a", b"", 2.0), (b"b", b"1", 1.0)])
    index.put_sessions([(b"b", b"2", 9.0)])
    assert index.all_sessions() == [(b"a", b"", 2.0), odd, (b"b", b"2", 9.0)]
    index.drop_sessions([b"a", b"none"])
    index = reopen(index)
    assert index.all_sessions() == [odd, (b"b", b"2", 9.0)]
    index.close()


def corrupt_header(path):
    path.write_bytes(os.urandom(8192))


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def break_pages(path):
    data = bytearray(path.read_bytes())
    for at in range(4096, len(data), 4096):
        data[at : at + 64] = b"\xff" * 64
    path.write_bytes(data)


def drop_table(path):
    db = sqlite3.connect(path)
    db.execute("DROP TABLE blocks")
    db.close()


def other_format(path):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("UPDATE meta SET value = 99 WHERE name = 'format'")
    db.close()


def empty(path):
    path.write_bytes(b"")


DAMAGES = [corrupt_header, truncate, break_pages, drop_table, other_format, empty]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_set_aside_and_the_opener_is_told(index, damage):
    index.put([block(n) for n in range(200)])
    index.checkpoint()
    index.close()
    damage(index.path)
    left = index.path.read_bytes()[4096:]  # SQLite may mark the first page as its own
    index = Index.open(index.path, GEOMETRY)
    assert index.opened.fresh_because not in (None, "new")
    assert index.load() == []
    aside = index.path.with_name("index.corrupt-1")
    assert aside.read_bytes()[4096:] == left or (damage is empty and aside.exists())
    index.put([block(1)])
    index = reopen(index)
    assert index.opened.fresh_because is None
    assert index.load() == [block(1)]
    index.close()


def test_at_most_three_damaged_sets_are_kept(index):
    index.close()
    for n in range(5):
        index.path.write_bytes(b"damage %d" % n * 1000)
        os.utime(index.path, (n, n))
        Index.open(index.path, GEOMETRY).close()
    kept = sorted(p.read_bytes()[:8] for p in index.path.parent.glob("index.corrupt-*"))
    assert kept == [b"damage 2", b"damage 3", b"damage 4"]


def test_a_folder_in_the_place_of_the_index_is_set_aside(path):
    path.mkdir()
    index = Index.open(path, GEOMETRY)
    assert "unable to open" in index.opened.fresh_because
    assert path.with_name("index.corrupt-1").is_dir()
    index.close()


def test_a_log_without_its_database_is_not_replayed_into_a_new_one(index):
    index.put([block(1)])
    log = index.path.with_name("index.db-wal")
    saved = log.read_bytes()
    assert saved
    index.close()
    index.path.unlink()
    log.write_bytes(saved)
    index = Index.open(index.path, GEOMETRY)
    assert index.opened.fresh_because == "new"
    assert index.load() == []
    index.close()


@pytest.mark.parametrize(
    "change",
    [
        "key = x'00000000000000000000000000000063'",
        "key = 'text'",
        "parent = x'00'",
        "parent = NULL",
        "nbytes = 8192",
        "layout = x'4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d4d'",
        "checksum = checksum + 1",
        "slot = 1048576",
        "nbytes = x'ff'",
    ],
)
def test_a_row_that_was_changed_is_dropped_and_counted(index, change):
    index.put([block(1), block(2), block(3)])
    index.close()
    db = sqlite3.connect(index.path, isolation_level=None)
    db.execute(f"UPDATE blocks SET {change} WHERE slot = 8192")  # noqa: S608
    db.close()
    index = Index.open(index.path, GEOMETRY)
    assert index.load() == [block(1), block(3)]
    assert index.damaged_rows == 1
    index.close()


def test_a_session_that_was_changed_is_dropped_and_counted(index):
    index.put_sessions([(b"a", b"1", 1.0), (b"b", b"2", 2.0), (b"c", b"3", 3.0)])
    index.close()
    db = sqlite3.connect(index.path, isolation_level=None)
    db.execute("UPDATE sessions SET doc = x'39' WHERE id = x'61'")
    db.execute("UPDATE sessions SET updated = 'soon' WHERE id = x'63'")
    db.close()
    index = Index.open(index.path, GEOMETRY)
    assert index.all_sessions() == [(b"b", b"2", 2.0)]
    assert index.damaged_rows == 2
    index.close()


def test_damage_found_while_in_use_costs_one_call_and_the_rows(index):
    index.put([block(n) for n in range(2000)])
    index.checkpoint()
    break_pages(index.path)
    index._db.execute("PRAGMA shrink_memory")
    with pytest.raises(TierBroken, match="malformed"):
        index.load()
    assert "malformed" in index.opened.fresh_because
    assert index.path.with_name("index.corrupt-1").exists()
    index.put([block(7)])
    assert index.load() == [block(7)]
    index = reopen(index)
    assert index.load() == [block(7)]
    index.close()


def test_a_full_disk_fails_the_call_and_later_calls_work(index):
    index.put([block(1)])
    index.checkpoint()
    pages = index._db.execute("PRAGMA page_count").fetchone()[0]
    index._db.execute(f"PRAGMA max_page_count={pages}")  # SQLite's own way to have SQLITE_FULL
    with pytest.raises(TierBroken, match="disk is full"):
        index.put([block(n) for n in range(10, 2000)])
    assert index.load() == [block(1)]
    index._db.execute("PRAGMA max_page_count=100000")
    index.put([block(2)])
    assert index.load() == [block(1), block(2)]


def test_threads_share_an_index(index):
    def work(n):
        for i in range(20):
            index.put([block(n * 1000 + i), block(n * 1000 + 500 + i)])
            index.drop([block(n * 1000 + 500 + i).key])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {b.key for b in index.load()} == {
        block(n * 1000 + i).key for n in range(6) for i in range(20)
    }


def test_a_closed_index_refuses_and_closes_again(index):
    index.close()
    index.close()
    for call in (index.load, index.checkpoint, lambda: index.put([block(1)])):
        with pytest.raises(TierBroken, match="closed"):
            call()
