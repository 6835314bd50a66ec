"""The processes of a run of `bench engine`: our service, and an engine for each contender.

A peer that fails is ended, said in a line, and takes no further part; where our own part or the
engine without a connector fails, the run fails.
"""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from tiered_kv.bench import engine_contenders as contenders
from tiered_kv.bench.engine_contenders import OURS, RECOMPUTE, Contender, Pythons
from tiered_kv.bench.engine_pipe import Child, EngineFailed

NVME_BYTES = 4 << 30
SETTLE_S = 2.0
Say = Callable[[str], None]


class Field:
    """A context: whatever it started has ended after it, and what it wrote is gone."""

    def __init__(
        self, pythons: Pythons, under: Path, say: Say, nvme_bytes: int = NVME_BYTES
    ) -> None:
        """`nvme_bytes` is what our service may keep on disk."""
        self._nvme_bytes = nvme_bytes
        self._pythons = pythons
        self._under = under
        self._say = say
        self._stack = ExitStack()
        self._entries: dict[str, tuple[Contender, Child]] = {}
        self._shape: dict[str, int] = {}
        # Engines name the cluster's address, and so must show a token that they know.
        self._token = secrets.token_hex()
        self.vocabulary = 0
        """Size of the model's vocabulary, once an engine has started."""

    def __enter__(self) -> Self:
        self._folder = self._stack.enter_context(_folder(self._under))
        # Ray's sockets lie below this one, and their paths must be short.
        self._ray = self._stack.enter_context(_folder(Path("/tmp")))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def names(self) -> list[str]:
        """Who takes part, in the order of their start."""
        return list(self._entries)

    def tiers(self, name: str) -> tuple[str, ...]:
        """The tiers whose wakes are measured; none for who computes."""
        return self._entries[name][0].tiers

    @contextmanager
    def asking(self, name: str) -> Iterator[Child]:
        """The engine of a contender. Raises `EngineFailed` for those that must not fail."""
        child = self._entries[name][1]
        try:
            yield child
        except EngineFailed as error:
            if name in (OURS, RECOMPUTE):
                raise
            self._say(f"{name} takes no further part: {error}")
            del self._entries[name]
            child.close()

    def start(
        self, model: Path | None, peers: tuple[str, ...], max_tokens: int, step: Say
    ) -> None:  # fmt: skip
        """Service and engines, one after the other; a minute or more. Raises `EngineFailed`."""
        step("starting the service")
        self._service = self._child("service", self._pythons.engine, "engine_service", {})
        own = {"RAY_ADDRESS": str(self._service.ask("start"))}
        if model is None:
            step("preparing the model")
            with self._child("model", self._pythons.engine, "engine_child", {}) as child:
                model = Path(child.ask("model"))
        self._shape = shape(model)
        for one in (contenders.recompute(), contenders.ours(own)):
            step(f"{one.name}: starting")
            self._begin(one, model, max_tokens)
        for name in peers:
            step(f"{name}: starting")
            one = contenders.peer(name, self._folder, self._pythons)
            try:
                self._begin(one, model, max_tokens)
            except EngineFailed as error:
                self._say(f"{name} is left out: {error}")

    def empty_memory(self, name: str) -> None:
        """What a contender keeps, it has on disk only afterwards, and the page cache has none of
        it: ours is pushed out by other sessions, vLLM's CPU tier is reset."""
        if name == OURS:
            self._service.ask("push_out", block_tokens=contenders.BLOCK_TOKENS, **self._shape)
        else:
            with self.asking(name) as child:
                child.ask("reset", connector=True)
        drop_from_page_cache(self._folder)

    def bytes_from_nvme(self) -> int:
        """What our service has read from its disk so far, to see that it did."""
        return int(self._service.ask("bytes_from_nvme"))

    def _begin(self, one: Contender, model: Path, max_tokens: int) -> None:
        python = self._pythons.peers if one.foreign else self._pythons.engine
        if python is None:
            raise EngineFailed("make setup-peers installs it, --peers-python names it")
        child = self._child(one.name, python, "engine_child", one.environ)
        started = child.ask(
            "start", model=str(model), connector=one.connector and dict(one.connector),
            page_tokens=contenders.PAGE_TOKENS, max_tokens=max_tokens, server=one.server,
            port=one.port, prepare=one.prepare,
        )  # fmt: skip
        child.ask("settle", seconds=SETTLE_S)  # and be warm
        self.vocabulary = started["vocabulary"]
        self._entries[one.name] = one, child

    def _child(self, name: str, python: Path, module: str, environ: Mapping[str, str]) -> Child:
        log = self._folder / f"{name.replace(' ', '-')}.log"
        everybody = os.environ | contenders.ENVIRONMENT | self._service_environ()
        child = Child(name, python, f"tiered_kv.bench.{module}", {**everybody, **environ}, log)
        return self._stack.enter_context(child)

    def _service_environ(self) -> dict[str, str]:
        """Of the service, and of engines that join it: as much memory as the others have."""
        fields = {
            "HBM_BYTES": 0,  # engines have their own
            "DRAM_BYTES": contenders.MEMORY_BYTES,
            "DRAM_POLICY": "lru",  # or sessions that come once would not push others out
            "DRAM_FOLDER": f"/dev/shm/{contenders.region_of('service')}",
            "NVME_BYTES": self._nvme_bytes,
            "NVME_FOLDER": self._folder / "nvme",
            "SERVICE_NAMESPACE": f"tiered_kv_bench_{os.getpid()}",
        }
        settings = {f"TIERED_KV_{name}": str(value) for name, value in fields.items()}
        ray = {"RAY_TMPDIR": str(self._ray), "RAY_ADDRESS": "", "RAY_AUTH_MODE": "token",
               "RAY_AUTH_TOKEN": self._token}  # fmt: skip
        return settings | ray


def drop_from_page_cache(folder: Path) -> None:
    """Forget the pages of all files below, written out first: posix_fadvise, which needs no rights
    and leaves the rest of the machine alone."""
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def shape(model: Path) -> dict[str, int]:
    """Layers, KV heads and head size, from a model's config.json. Raises `OSError`."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }


@contextmanager
def _folder(under: Path) -> Iterator[Path]:
    """A folder of this run, removed afterwards with what its engines left in shared memory."""
    under.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kvb", dir=under))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for left in Path("/dev/shm").glob(f"*{contenders.region_of('')}*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
