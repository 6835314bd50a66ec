"""Checks of what callers pass to a node. Each raises `BadInput` that names the value."""

import math
from collections.abc import Sequence

from tiered_kv.errors import BadInput
from tiered_kv.keys import KEY_BYTES

LONGEST_S = 86_400.0
"""A day. A lease whose reader died ends by time alone, so no lease may last for ever."""
MAX_CHECKSUM = (1 << 64) - 1


def check_run(run: object) -> None:
    """Keys in prefix order: 16 bytes each, none named twice. O(run)."""
    if not isinstance(run, list | tuple):
        raise BadInput(f"a run must be a list of keys, not {short(run)}")
    if not (set(map(type, run)) <= {bytes} and set(map(len, run)) <= {KEY_BYTES}):
        for key in run:  # some tens of nanoseconds a key until here
            check_key(key)
    if len(set(run)) != len(run):
        twice = next(key for i, key in enumerate(run) if key in run[:i])
        raise BadInput(f"key {twice.hex()} is named twice in one run")


def check_parents(parents: object, n: int) -> None:
    """A parent, or None, for each of `n` keys; None for all of them is fine."""
    if parents is None:
        return
    if not isinstance(parents, list | tuple) or len(parents) != n:
        raise BadInput(f"{n} keys came with parents {short(parents)}")
    for key in parents:
        if key is not None:
            check_key(key)


def check_key(key: object) -> None:
    """What `keys` makes: 16 bytes."""
    if type(key) is not bytes or len(key) != KEY_BYTES:
        raise BadInput(f"a block key has {KEY_BYTES} bytes, and {short(key)} is none")


def check_checksums(checksums: Sequence[object] | None) -> None:
    """xxh3_64 of each block, where they are given."""
    for i, value in enumerate(checksums or ()):
        if type(value) is not int or not 0 <= value <= MAX_CHECKSUM:
            raise BadInput(f"checksum {short(value)} of block {i} is not in 0..2**64-1")


def check_count(name: str, value: object) -> None:
    """A whole number that is not negative."""
    if type(value) is not int or value < 0:
        raise BadInput(f"{name} must be a whole number from 0 on, not {short(value)}")


def check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """A time span of at most a day; 0 only where `zero` allows it."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not 0 <= value <= LONGEST_S or not (value or zero):  # type: ignore[operator]
        least = "from 0" if zero else "above 0"
        raise BadInput(f"{name} must be {least} to {LONGEST_S:g} seconds, not {short(value)}")


def short(value: object) -> str:
    """A value for a message, cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:60]}... ({len(shown)} characters)"
