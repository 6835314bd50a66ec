"""Policies by name. `eviction("lru", capacity_blocks)` makes one; `EVICTION` lists them."""

from tiered_kv.errors import UnknownName
from tiered_kv.policies.adaptive import Adaptive
from tiered_kv.policies.arc import ARC
from tiered_kv.policies.base import EvictionPolicy
from tiered_kv.policies.belady import MIN
from tiered_kv.policies.fifo import FIFO
from tiered_kv.policies.gdsf import GDSF
from tiered_kv.policies.lru import LRU
from tiered_kv.policies.lru2 import LRU2
from tiered_kv.policies.lru_head_first import HeadFirstLRU
from tiered_kv.policies.lru_tail_optimised import TailOptimisedLRU
from tiered_kv.policies.s3fifo import S3FIFO
from tiered_kv.policies.sieve import Sieve
from tiered_kv.policies.wtinylfu import WTinyLFU

EVICTION: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (
        Adaptive, ARC, FIFO, GDSF, HeadFirstLRU, LRU, LRU2, MIN, S3FIFO, Sieve,
        TailOptimisedLRU, WTinyLFU,
    )
}  # fmt: skip

_COMPARED = ("lru_head_first", "min")
SERVING = {name: policy for name, policy in EVICTION.items() if name not in _COMPARED}
"""What a service may use: `min` needs the future, `lru_head_first` is there to compare with."""


def eviction(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A fresh eviction policy. Raises `UnknownName` with the list of known ones."""
    if name not in EVICTION:
        raise UnknownName(f"eviction policy {name!r} is not one of {', '.join(sorted(EVICTION))}")
    return EVICTION[name](capacity_blocks)
