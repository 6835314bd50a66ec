"""The SQLite file of the index: how it is opened, described and set aside."""

import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 1
"""Of the tables; an index of another one is set aside."""

_KEPT = 3  # index file sets that are kept for inspection

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Result codes after which a file is not used again."""

TABLES = """
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

    def as_meta(self) -> dict[str, int]:
        """The rows of `meta`."""
        return {"format": FORMAT, **asdict(self)}


def connect(path: Path) -> sqlite3.Connection:
    """Open or create the file, write-ahead log on. Raises `sqlite3.Error` and holds nothing."""
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


def code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for errors of the Python module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def set_aside(path: Path) -> None:
    """Rename the file set to `index.corrupt-N`; beyond three sets the oldest gives way."""
    names = [path.with_name(f"{path.stem}.corrupt-{n}") for n in range(1, _KEPT + 1)]
    aside = min(names, key=lambda name: name.stat().st_mtime if name.exists() else 0.0)
    for suffix in ("-wal", "-shm", ""):
        file, target = (p.with_name(p.name + suffix) for p in (path, aside))
        if file.exists():
            file.replace(target)


def read_meta(db: sqlite3.Connection) -> dict[str, int]:
    """What the file says about itself. Raises `sqlite3.Error` when the table is not there."""
    rows = db.execute("SELECT name, value FROM meta").fetchall()
    return {name.decode("utf-8", "replace"): value for name, value in rows}
