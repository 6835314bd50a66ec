"""A tiered KV cache service for LLM inference that lives inside a Ray cluster.

    import tiered_kv

    with tiered_kv.connect() as kv:
        kv.save("chat-1", layout, tokens, fill)

Importing this costs nothing: names are loaded when they are used, and with them Ray and torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered_kv.client import Client, connect
    from tiered_kv.config import Config
    from tiered_kv.errors import (
        BadConfig,
        BadInput,
        BadLayout,
        BadSession,
        DoesNotFit,
        FolderInUse,
        StaleHandle,
        TierBroken,
        TieredKVError,
        UnknownName,
        UnknownSession,
        Unreachable,
        UnsupportedCache,
    )
    from tiered_kv.layout import KVLayout

__version__ = "0.1.0"
__all__ = [
    "BadConfig",
    "BadInput",
    "BadLayout",
    "BadSession",
    "Client",
    "Config",
    "DoesNotFit",
    "FolderInUse",
    "KVLayout",
    "StaleHandle",
    "TierBroken",
    "TieredKVError",
    "UnknownName",
    "UnknownSession",
    "Unreachable",
    "UnsupportedCache",
    "connect",
]

_HOMES = {"Client": "client", "connect": "client", "Config": "config", "KVLayout": "layout"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tiered_kv' has no attribute {name!r}")
    return getattr(import_module(f"tiered_kv.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
