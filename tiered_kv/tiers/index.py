"""What is where on the NVMe, kept in SQLite so that a restart is warm.

The index is never trusted with correctness: a row says where bytes should be, its checksum decides
whether they are. Rows are sealed (see `index_rows`), so that a damaged one is dropped, not used.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tiered_kv.errors import TierBroken
from tiered_kv.tiers.index_rows import (
    SessionRow,
    block_of,
    block_record,
    session_of,
    session_record,
)
from tiered_kv.types import BlockKey, Located

FORMAT = 1
_KEPT = 3  # index file sets that are kept for inspection
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE blocks(slot INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, parent BLOB,
    nbytes INTEGER NOT NULL, layout BLOB NOT NULL, checksum INTEGER NOT NULL,
    written_at INTEGER NOT NULL, seal INTEGER NOT NULL);
CREATE TABLE sessions(id BLOB PRIMARY KEY, doc BLOB NOT NULL, updated REAL NOT NULL,
    seal INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How slots map to files; rows written under another one point at the wrong places."""

    slab_bytes: int
    stripes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """What became of the former index. `fresh_because` is None when it was used, "new" when there
    was none, else why it was set aside. `dropped_rows` were of another geometry."""

    fresh_because: str | None
    dropped_rows: int


class Index:
    """An open index. All calls block for one SQLite transaction, and are safe from any thread.

    What fails raises `TierBroken` with SQLite's text; the call then changed nothing, and later
    calls work again as soon as the cause has gone. `damaged_rows` counts rows whose seal is broken.
    """

    def __init__(self, path: Path, geometry: Geometry) -> None:
        self.path = path
        self.damaged_rows = 0
        self._geometry = geometry
        self._lock = threading.Lock()
        self._sequence = 0
        self._closed = False
        self._db: sqlite3.Connection | None = None
        self.opened = self._open()

    @classmethod
    def open(cls, path: Path, geometry: Geometry) -> Self:
        """Open or create the index. A damaged one is renamed to `index.corrupt-N` and replaced.

        Reads the whole file once to check it. Raises `TierBroken` on an unusable folder.
        """
        return cls(path, geometry)

    def put(self, blocks: Sequence[Located]) -> None:
        """Record sealed blocks; a row of the same slot or key is replaced. One transaction."""
        with self._transaction("record blocks in") as db:
            first = self._sequence + 1
            db.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?,?,?,?,?,?,?,?)",
                [block_record(block, first + i) for i, block in enumerate(blocks)],
            )
            self._sequence += len(blocks)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Remove rows; keys that are not there are ignored. One transaction."""
        with self._transaction("drop blocks from") as db:
            db.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key in keys])

    def load(self) -> list[Located]:
        """All sound rows in the order they were written. O(rows)."""
        with self._transaction("read") as db:
            records = db.execute("SELECT * FROM blocks ORDER BY written_at").fetchall()
            found = [block_of(record) for record in records]
            self.damaged_rows += found.count(None)
        return [block for block in found if block is not None]

    def put_sessions(self, sessions: Sequence[SessionRow]) -> None:
        """Insert or replace session documents. One transaction."""
        with self._transaction("record sessions in") as db:
            db.executemany(
                "INSERT OR REPLACE INTO sessions VALUES (?,?,?,?)",
                [session_record(session) for session in sessions],
            )

    def drop_sessions(self, ids: Sequence[bytes]) -> None:
        """Remove session documents; unknown ids are ignored. One transaction."""
        with self._transaction("drop sessions from") as db:
            db.executemany("DELETE FROM sessions WHERE id = ?", [(name,) for name in ids])

    def all_sessions(self) -> list[SessionRow]:
        """All sound session documents, the longest untouched first. O(rows)."""
        with self._transaction("read sessions of") as db:
            records = db.execute("SELECT * FROM sessions ORDER BY updated").fetchall()
            found = [session_of(record) for record in records]
            self.damaged_rows += found.count(None)
        return [session for session in found if session is not None]

    def checkpoint(self) -> None:
        """Move the log into the database and sync both to the medium."""
        with self._lock:
            try:
                self._connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error as error:
                raise TierBroken(f"cannot checkpoint {self.path}: {error}") from error

    def close(self) -> None:
        """Close without waiting for the medium. Idempotent."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def _connection(self) -> sqlite3.Connection:
        if self._closed:
            raise TierBroken(f"the index {self.path} is closed")
        if self._db is None:  # it was found damaged and could not be replaced then
            self.opened = self._fresh("replaced")
        assert self._db is not None
        return self._db

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            db = self._connection()
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except sqlite3.Error as error:
                if _code(error) in _DAMAGED:  # this call fails, the next one has a fresh index
                    self.opened = self._fresh(str(error))
                raise TierBroken(f"cannot {doing} {self.path}: {error}") from error
            finally:
                if self._db is db and db.in_transaction:
                    with suppress(sqlite3.Error):  # then the next BEGIN says so
                        db.execute("ROLLBACK")

    def _open(self) -> Opened:
        if not self.path.exists():
            return self._fresh("new")
        try:
            db = self._db = _connect(self.path)
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0].decode()
            if verdict != "ok":
                return self._fresh(verdict)
            if (found := _read_meta(db).get("format")) != FORMAT:
                return self._fresh(f"format {found}, not {FORMAT}")
            newest = db.execute("SELECT coalesce(max(written_at), 0) FROM blocks").fetchone()[0]
            self._sequence = newest if isinstance(newest, int) else 0
            return Opened(None, self._adapt(db))
        except sqlite3.Error as error:
            # SQLITE_ERROR: a table or column is not there
            if _code(error) in (*_DAMAGED, sqlite3.SQLITE_ERROR) or not self.path.is_file():
                return self._fresh(str(error))
            self._disconnect()
            raise TierBroken(f"cannot open {self.path}: {error}") from error

    def _adapt(self, db: sqlite3.Connection) -> int:
        """Rows dropped because they were written under another geometry."""
        wanted = _meta(self._geometry)
        if _read_meta(db) == wanted:
            return 0
        db.execute("BEGIN IMMEDIATE")
        dropped = db.execute("DELETE FROM blocks").rowcount
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?,?)", wanted.items())
        db.execute("COMMIT")
        return dropped

    def _fresh(self, why: str) -> Opened:
        """Set the former files aside, if there are any, and begin an empty index."""
        self._disconnect()
        try:
            _set_aside(self.path)
            db = _connect(self.path)
            db.executescript(f"BEGIN;{_TABLES}COMMIT;")
            self._adapt(db)
        except (sqlite3.Error, OSError) as error:
            raise TierBroken(f"cannot create {self.path}: {error}") from error
        self._db = db
        return Opened(why, 0)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.text_factory = bytes  # damage can turn a blob into text that is no UTF-8
    try:
        # Exclusive: the folder's lock makes the file ours, and no shared-memory file is mapped,
        # whose pages would be a SIGBUS on a full disk.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL").fetchall()
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={64 << 20}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for errors of the Python module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _set_aside(path: Path) -> None:
    """Rename the file set to `index.corrupt-N`; beyond three sets the oldest gives way."""
    names = [path.with_name(f"{path.stem}.corrupt-{n}") for n in range(1, _KEPT + 1)]
    aside = min(names, key=lambda name: name.stat().st_mtime if name.exists() else 0.0)
    for suffix in ("-wal", "-shm", ""):
        file, target = (p.with_name(p.name + suffix) for p in (path, aside))
        if file.exists():
            file.replace(target)
        elif path.exists():
            target.unlink(missing_ok=True)  # of the set that gives way


def _read_meta(db: sqlite3.Connection) -> dict[str, int]:
    rows = db.execute("SELECT name, value FROM meta").fetchall()
    return {name.decode("utf-8", "replace"): value for name, value in rows}


def _meta(geometry: Geometry) -> dict[str, int]:
    return {
        "format": FORMAT,
        "slab_bytes": geometry.slab_bytes,
        "stripes": geometry.stripes,
        "capacity_bytes": geometry.capacity_bytes,
    }
