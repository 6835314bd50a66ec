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
from tiered_kv.tiers.index_file import (
    DAMAGED,
    FORMAT,
    TABLES,
    Geometry,
    code,
    connect,
    read_meta,
    set_aside,
)
from tiered_kv.tiers.index_rows import (
    SessionRow,
    block_of,
    block_record,
    session_of,
    session_record,
)
from tiered_kv.types import BlockKey, Located


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
                if code(error) in DAMAGED:  # this call fails, the next one has a fresh index
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
            db = self._db = connect(self.path)
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0].decode()
            if verdict != "ok":
                return self._fresh(verdict)
            if (found := read_meta(db).get("format")) != FORMAT:
                return self._fresh(f"format {found}, not {FORMAT}")
            newest = db.execute("SELECT coalesce(max(written_at), 0) FROM blocks").fetchone()[0]
            self._sequence = newest if isinstance(newest, int) else 0
            return Opened(None, self._adapt(db))
        except sqlite3.Error as error:
            # SQLITE_ERROR: a table or column is not there
            if code(error) in (*DAMAGED, sqlite3.SQLITE_ERROR) or not self.path.is_file():
                return self._fresh(str(error))
            self._disconnect()
            raise TierBroken(f"cannot open {self.path}: {error}") from error

    def _adapt(self, db: sqlite3.Connection) -> int:
        """Rows dropped because they were written under another geometry."""
        wanted = self._geometry.as_meta()
        if read_meta(db) == wanted:
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
            set_aside(self.path)
            db = connect(self.path)
            db.executescript(f"BEGIN;{TABLES}COMMIT;")
            self._adapt(db)
        except (sqlite3.Error, OSError) as error:
            raise TierBroken(f"cannot create {self.path}: {error}") from error
        self._db = db
        return Opened(why, 0)
