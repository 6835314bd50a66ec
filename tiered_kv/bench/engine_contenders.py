"""Who takes part in `bench engine`: our connector, no connector, and the caches of others."""

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiered_kv.errors import BadInput, TieredKVError

RECOMPUTE, OURS = "no connector", "tiered_kv"
DRAM, NVME = "dram", "nvme"
LMCACHE, CPU_TIER, FS = "lmcache", "vllm-cpu-tier", "vllm-fs"
PEERS = (CPU_TIER, FS, LMCACHE)

PAGE_TOKENS = 32
BLOCK_TOKENS = 256
"""Tokens of a block of everybody that chooses (LMCache's default, and ours)."""
MEMORY_BYTES = 1 << 30
"""Host memory that each cache may use."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The same for all: engine, scheduler and worker in one process."""


class EngineMissing(TieredKVError):
    """There is no Python with vLLM to run engines with. The message has the command."""


@dataclass(frozen=True)
class Contender:
    """An engine and its cache. Wakes from `tiers` are measured; a `foreign` one needs the peers'
    environment; `server` is a command that listens on `port` of this machine; `prepare` names a
    module, see `engine_child.Engine.start`."""

    name: str
    tiers: tuple[str, ...] = ()
    connector: Mapping[str, Any] | None = None
    foreign: bool = False
    server: tuple[str, ...] = ()
    port: int = 0
    prepare: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pythons:
    """The interpreters to run engines with; `peers` is None where LMCache is not installed."""

    engine: Path
    peers: Path | None


def recompute() -> Contender:
    """An engine that has only its own prefix cache."""
    return Contender(RECOMPUTE)


def ours(environ: Mapping[str, str]) -> Contender:
    """Our connector; `environ` says which service it joins."""
    connector = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"block_tokens": BLOCK_TOKENS},
    }
    return Contender(OURS, (DRAM, NVME), connector, environ=environ)


def peer(name: str, folder: Path, pythons: Pythons) -> Contender:
    """One of `PEERS`; what it keeps on disk lies below `folder`."""
    if name == LMCACHE:
        return _lmcache(pythons.peers)
    return _cpu_tier() if name == CPU_TIER else _fs(folder)


def _cpu_tier() -> Contender:
    """vLLM's own CPU tier, in chunks of a page, as it is by default."""
    return Contender(CPU_TIER, (DRAM,), _offloading(CPU_TIER, {"blocks_per_chunk": 1}))


def _fs(folder: Path) -> Contender:
    """vLLM's file tier below its CPU tier: a file each 256 tokens."""
    tier = {"type": "fs", "root_dir": str(folder / "vllm-fs")}
    more = {"blocks_per_chunk": BLOCK_TOKENS // PAGE_TOKENS, "secondary_tiers": [tier]}
    return Contender(FS, (NVME,), _offloading(FS, more))


def _lmcache(python: Path | None) -> Contender:
    """LMCache's server and its multiprocess connector."""
    port, http = free_ports(2)
    program = "lmcache" if python is None else str(python.parent / "lmcache")
    server = (
        program, "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http), "--chunk-size", str(BLOCK_TOKENS),
        "--l1-size-gb", str(MEMORY_BYTES >> 30), "--no-l1-use-lazy", "--eviction-policy", "LRU",
        "--disable-observability",
        "--supported-transfer-mode", "auto", "--shm-name", region_of(LMCACHE),
    )  # fmt: skip
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
        },
    }
    prepare = "tiered_kv.bench.peers.lmcache"
    return Contender(LMCACHE, (DRAM,), connector, True, server, port, prepare)


def engine_python(given: str | None) -> Path:
    """The Python to run engines with: the given one, this one if it has vLLM, or that of
    `make setup-engine`. Raises `EngineMissing`."""
    if given is None and importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    found = _python(given, ".venv-engine", "--engine-python")
    if found is None:
        raise EngineMissing(
            "no Python with vLLM is known: make setup-engine, or name one with --engine-python"
        )
    return found


def peers_python(given: str | None) -> Path | None:
    """The Python that has LMCache too; None when there is none. Raises `BadInput` when the given
    one is not there."""
    return _python(given, ".venv-peers", "--peers-python")


def check_peers(names: Sequence[str]) -> tuple[str, ...]:
    """Peers by name, in our order. Raises `BadInput` naming an unknown one."""
    for name in names:
        if name not in PEERS:
            raise BadInput(f"--peers: {name!r} is not one of {', '.join(PEERS)}")
    return tuple(name for name in PEERS if name in names)


def free_ports(n: int) -> list[int]:
    """Ports of this machine that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def region_of(name: str) -> str:
    """A name for what a contender of this process has in shared memory: whoever makes the file
    adds to it, and what is left of it is removed by it."""
    return f"tiered-kv-bench-{os.getpid()}-{name}"


def _offloading(name: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": region_of(name),
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tiered_kv.bench.peers.vllm_tiers",
            "cpu_bytes_to_use": MEMORY_BYTES,
            **extra,
        },
    }


def _python(given: str | None, folder: str, option: str) -> Path | None:
    if given is not None:
        if not os.access(given, os.X_OK):
            raise BadInput(f"{option}: {given!r} is no program")
        return Path(given).absolute()
    beside = Path(__file__).parents[2] / folder / "bin" / "python"
    return beside if beside.exists() else None
