"""Policies by name. `eviction("lru", capacity_blocks)` makes one; `EVICTION` lists them."""

from tiered_kv.errors import UnknownName
from tiered_kv.policies.adaptive import Adaptive
from tiered_kv.policies.base import EvictionPolicy
from tiered_kv.policies.fifo import FIFO
from tiered_kv.policies.lru import LRU
from tiered_kv.policies.lru_tail_optimised import TailOptimisedLRU

EVICTION: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (Adaptive, FIFO, LRU, TailOptimisedLRU)
}


def eviction(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A fresh eviction policy. Raises `UnknownName` with the list of known ones."""
    if name not in EVICTION:
        raise UnknownName(f"eviction policy {name!r} is not one of {', '.join(sorted(EVICTION))}")
    return EVICTION[name](capacity_blocks)
