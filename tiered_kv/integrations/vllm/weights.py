"""What names the weights of a model in keys, so that two of them never share a block.

A snapshot of the Hugging Face hub is named by its commit. Files in any other folder are read once,
whole (xxh3_128; a merged adapter may change a single matrix), and remembered beside the user's
cache by path, size and time of change, so that each of eight ranks does not read them again.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from tiered_kv.errors import BadLayout

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_CHUNK_BYTES = 16 << 20
# Where a config was loaded from and what it was saved with do not change what it computes.
_NOT_IDENTITY = frozenset(("_name_or_path", "_commit_hash", "transformers_version", "use_cache"))


def local(model: str, revision: str | None, cache: str | None) -> str:
    """Where the files of a model are: of one that is named as on the Hugging Face hub, its
    snapshot in the hub's cache (`cache`: another folder of it). `model` itself where there is
    none. Asks no network."""
    if os.path.exists(model):
        return model
    from huggingface_hub import snapshot_download  # every engine has it

    try:
        return str(snapshot_download(model, revision=revision, cache_dir=cache,
                                     local_files_only=True))  # fmt: skip
    except (OSError, ValueError):  # not in the cache; no name of the hub
        return model


def revision_of(model: str, hf_config: dict[str, Any], load_format: str, seed: int) -> str:
    """A string that changes with any bit that this model computes KV from.

    Blocks for about 0.2 s a GB the first time. Raises `BadLayout` for weights that are neither a
    local folder nor a file: those need the option `revision`.
    """
    config = {k: v for k, v in hf_config.items() if k not in _NOT_IDENTITY}
    state = hashlib.blake2b(digest_size=16, person=b"tieredkv.weights")
    state.update(json.dumps(config, sort_keys=True, default=str).encode())
    if load_format == "dummy":
        state.update(f"dummy {seed}".encode())
        return state.hexdigest()
    path = Path(os.path.realpath(model))
    snapshot = _SNAPSHOT.search(str(Path(model).absolute()))
    if snapshot is not None:
        state.update(f"hub {snapshot[1]} {snapshot[2]}".encode())
        return state.hexdigest()
    files = [path] if path.is_file() else sorted(_files(path))
    if not files:
        raise BadLayout(
            f"the weights of {model!r} are not files here: name them with "
            "kv_connector_extra_config={'revision': ...}"
        )
    with _remembered() as known:
        for file in files:
            name = file.name if path.is_file() else str(file.relative_to(path))
            state.update(f"\n{name} {_digest(file, known)}".encode())
    return state.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (f for f in folder.rglob("*") if f.suffix in WEIGHTS and f.is_file())


def _digest(file: Path, known: dict[str, str]) -> str:
    info = file.stat()
    name = f"{os.path.realpath(file)} {info.st_size} {info.st_mtime_ns} {info.st_ino}"
    if name not in known:
        state = xxhash.xxh3_128()
        with open(file, "rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                state.update(chunk)
        known[name] = state.hexdigest()
    return known[name]


@contextmanager
def _remembered() -> Iterator[dict[str, str]]:
    """Digests by file, locked: who comes second waits for the first and reads nothing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered_kv"
    known: dict[str, str] = {}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fd = os.open(cache / "weights.json", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield known  # no place to remember: every process reads for itself
        return
    with open(fd, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(ValueError):
            found = json.load(file)
            if isinstance(found, dict):
                known = {str(k): str(v) for k, v in found.items()}
        before = dict(known)
        yield known
        if known != before:
            file.seek(0)
            file.truncate()
            json.dump(known, file)
