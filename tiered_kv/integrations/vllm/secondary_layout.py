"""What the bytes of vLLM's offload chunks mean, and in which order they follow each other.

A chunk is one row of vLLM's primary tier: the pages of all workers of an engine, padded to 4096
bytes. We keep rows whole and never look into them, so a row is a block of ours.
"""

import hashlib
import json
import platform as machine
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiered_kv.errors import BadLayout
from tiered_kv.integrations.vllm.weights import revision_of
from tiered_kv.layout import KVLayout
from tiered_kv.types import ALIGNMENT

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig

GROUP_BYTES = 4
"""An offload key is the engine's chained hash and the index of its KV cache group."""


class Placed(NamedTuple):
    """A chunk in the primary tier: its offload key, and its row there as a byte offset."""

    key: bytes
    at: int


def layout_of(spec: "OffloadingSpec", row_bytes: int, revision: str = "") -> KVLayout:
    """The layout of rows of `row_bytes`.

    Without `revision` the files of the weights are read once (see `weights.revision_of`). vLLM
    tells its offload layer neither `hf_overrides` nor a quantization chosen at the start: who uses
    these gives a `revision` that names them too. Raises `BadLayout`.
    """
    config = spec.config
    if row_bytes % ALIGNMENT:
        raise BadLayout(f"rows of {row_bytes} bytes are not a multiple of {ALIGNMENT}")
    tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    tokens = gcd(tokens, row_bytes)  # no token would fill a whole number of bytes otherwise
    return KVLayout(
        model=config.model.name,
        revision=revision or revision_of(config.model.name, _config_of(config.model.name), "", 0),
        dtype="uint8",
        layers=1,
        planes=1,
        kv_heads=1,
        head_dim=row_bytes // tokens,
        block_tokens=tokens,
        engine=_engine(config, row_bytes),
    )


def in_prefix_order(
    chunks: Sequence[Placed], positions: Mapping[bytes, int]
) -> tuple[list[Placed], list[bytes | None]]:
    """The chunks of one request, heads first, and the chunk before each as far as it is known.

    `positions` are the end tokens of all chunks of the request; groups are chains of their own.
    O(n log n).
    """
    chains: dict[bytes, list[tuple[int, bytes]]] = {}
    for key, end in positions.items():
        chains.setdefault(key[-GROUP_BYTES:], []).append((end, key))
    before: dict[bytes, bytes] = {}
    for chain in chains.values():
        chain.sort()
        before.update((key, parent) for (_, parent), (_, key) in pairwise(chain))
    ordered = sorted(chunks, key=lambda c: (c.key[-GROUP_BYTES:], positions.get(c.key, 0)))
    return ordered, [before.get(chunk.key) for chunk in ordered]


def _config_of(model: str) -> dict[str, Any]:
    """The model's config as it lies beside its weights; the hub's are named by their commit."""
    try:
        found = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _engine(config: "OffloadingConfig", row_bytes: int) -> str:
    """Everything else that the bytes of a row depend on, as one line."""
    import vllm

    parallel = asdict(config.parallel)
    for name in ("data_parallel_index", "data_parallel_size", "data_parallel_rank_local"):
        parallel.pop(name, None)  # replicas compute the same
    details = {
        "groups": [asdict(group) for group in config.groups],
        "cache": asdict(config.cache),
        "dtype": config.model.dtype,
        "parallel": parallel,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "row_bytes": row_bytes,
        "replicated": getattr(config, "replicated_layout", False),
        "canonical": getattr(config, "canonical_layout", False),
        "kv_cache_layout": getattr(config, "kv_cache_layout", None),
    }
    text = json.dumps(details, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"vllm-offload:{vllm.__version__}:{_device()}:{digest}"


def _device() -> str:
    """The device or the instruction set that the kernels choose by."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        isa = torch.backends.cpu.get_cpu_capability()
        return f"{machine.machine()}-{isa}{'-amx' if amx else ''}"
    return str(current_platform.get_device_name()).replace(" ", "-")
