"""Load a hit from slower tiers, or compute it again: whichever is modelled to be faster.

Pure arithmetic over what was measured: bandwidth, latency and queue of each tier, and the GPU's
prefill rate. A decision is never modelled slower than recomputing everything, nor than loading
everything. Tokens, bytes and seconds throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiered_kv.errors import BadInput
from tiered_kv.policies.links import Link

Floats = NDArray[np.float64]
Position = TypeVar("Position", float, Floats)

IN_POOL = -1
"""In `Hit.where`: a block that need not be read, only copied to the engine."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A GPU as measured: tokens from position `a` to `b` take `linear_s * (b - a) +
    quadratic_s * (b**2 - a**2)` seconds; the second term is attention to all that is before.
    `queued_s` of other work are ahead of us; loading can go on meanwhile."""

    linear_s: float
    quadratic_s: float = 0.0
    queued_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.linear_s >= 0 and self.quadratic_s >= 0 and self.queued_s >= 0):
            raise BadInput(f"prefill takes no negative time, and {self} does")

    def seconds(self, start: Position, end: float) -> Position:
        """Time to compute the tokens from `start` to `end` when those before are there."""
        return self.linear_s * (end - start) + self.quadratic_s * (end * end - start * start)

    @classmethod
    def of_model(
        cls, *, layers: int, d: int, a: float = 4, b: float = 22, flops: float
    ) -> "Prefill":
        """`n` tokens cost `layers * (a n^2 d + b n d^2)` operations (Mooncake, FAST'25, eq. 1).

        `d` is the hidden size, `a` and `b` the model's factors for attention and for its matrices,
        `flops` what the GPUs do in a second.
        """
        return cls(layers * b * d * d / flops, layers * a * d / flops)


@dataclass(frozen=True, slots=True)
class Decision:
    """Load the first `load` blocks of the hit and compute the rest, and what that should take.

    Blocks that are in the pool already count as loaded. The estimates run from the decision until
    the last token of the prompt is computed, which is what the policy can change about the time
    to the first token; `read_s` until the last of the loaded blocks has left its tier.
    """

    load: int
    recompute: int
    seconds: float
    load_all_s: float
    recompute_all_s: float
    read_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hit:
    """What was found: `blocks` leading blocks, and `new_tokens` behind them that nobody has.

    `before_tokens` precede the hit and are with the engine. `layers` above 1 says that the engine
    computes a layer as soon as that layer has been loaded. `where` has an index into the media
    for each block, or `IN_POOL`; when it is empty the whole hit lies in the first medium.
    """

    blocks: int
    block_tokens: int
    block_bytes: int
    new_tokens: int = 1
    layers: int = 1
    where: tuple[int, ...] = ()
    before_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.blocks, self.new_tokens, self.before_tokens) < 0 or min(
            self.block_tokens, self.block_bytes, self.layers
        ) < 1:  # fmt: skip
            raise BadInput(f"{self} cannot be a hit")
        if self.where and len(self.where) != self.blocks:
            raise BadInput(
                f"where = {self.where} is not one place for each of {self.blocks} blocks"
            )


def decide(hit: Hit, media: Sequence[Link], prefill: Prefill, copy: Link | None = None) -> Decision:
    """How much of the hit to load. O(blocks), 30 us for 128 of them.

    `media` are the tiers that blocks are read from, side by side and each in the order of the
    run; `copy` is the last leg, from the pool to the engine, which all blocks pass. Raises
    `BadInput` where `hit.where` names a medium that is not there. Recomputing wins a tie: it
    needs nobody else.
    """
    times = _modelled(hit, media, prefill, copy)
    best = int(times.seconds.argmin())
    return Decision(
        load=best,
        recompute=hit.blocks - best,
        seconds=float(times.seconds[best]),
        load_all_s=_at(times.seconds, hit.blocks),
        recompute_all_s=float(times.seconds[0]),
        read_s=float(times.read[best]),
    )


def modelled_s(
    load: int, hit: Hit, media: Sequence[Link], prefill: Prefill, copy: Link | None = None
) -> float:
    """Seconds when the first `load` blocks are loaded and all others are computed; infinite where
    one of them cannot be loaded.

    Loading and computing are a pipeline of two stages over the layers: the last layer is computed
    when all layers before it were, and each when it has been loaded. So a stream of bytes that
    begins after `w` seconds and takes `x`, beside `c` seconds of computing, ends at
    `w + max(x / layers + c, x + c / layers)`, and the slowest stream counts. With one layer that
    is loading, then computing.

    Without `copy` every medium is a stream of its own. With it, blocks are read whole (a medium
    is done after its wait and its bytes) and pass the copy leg in order, each as soon as it has
    been read; the stream is what is left to copy when the last of them has been read.
    """
    return _at(_modelled(hit, media, prefill, copy).seconds, load)


class _Times(NamedTuple):
    """By number of loaded blocks, from 0 to the last that can be loaded."""

    seconds: Floats
    read: Floats


def _at(times: Floats, load: int) -> float:
    return float(times[load]) if load < len(times) else float("inf")


def _modelled(hit: Hit, media: Sequence[Link], prefill: Prefill, copy: Link | None) -> _Times:
    where = _places(hit, media, copy)
    load = np.arange(len(where) + 1, dtype=np.float64)
    end = hit.before_tokens + hit.blocks * hit.block_tokens + hit.new_tokens
    compute = prefill.seconds(hit.before_tokens + load * hit.block_tokens, end)
    seconds = prefill.queued_s + compute
    read = np.zeros_like(load)
    for index, link in enumerate(media):
        mine = where == index
        first = int(mine.argmax()) if len(mine) else 0
        if not mine[first : first + 1].any():
            continue
        wait_s, moved_s = link.wait_s(), np.cumsum(mine) * (hit.block_bytes / link.bytes_per_s)
        read[first + 1 :] = np.maximum(read[first + 1 :], wait_s + moved_s[first:])
        if copy is None:
            ends = wait_s + _pipelined(moved_s[first:], compute[first + 1 :], hit.layers)
            seconds[first + 1 :] = np.maximum(seconds[first + 1 :], ends)
    if copy is not None and len(where):
        began = np.maximum(read, copy.wait_s())[1:]
        left = _copied(hit, read, copy) - began
        ends = began + _pipelined(left, compute[1:], hit.layers)
        seconds[1:] = np.maximum(seconds[1:], ends)
    return _Times(seconds, read)


def _places(hit: Hit, media: Sequence[Link], copy: Link | None) -> NDArray[np.int64]:
    """Where the leading blocks are that can be loaded: those before the first on a dead tier."""
    where = np.array(hit.where or (0,) * hit.blocks, dtype=np.int64)
    if hit.blocks and not (where.min() >= IN_POOL and where.max() < len(media)):
        raise BadInput(f"where = {hit.where or (0,)} names a medium that is not of {len(media)}")
    if copy is not None and copy.wait_s() == float("inf"):
        return where[:0]
    for index, link in enumerate(media):
        if link.wait_s() == float("inf"):
            stuck = where == index
            where = where[: stuck.argmax()] if stuck.any() else where
    return where


def _pipelined(load: Floats, compute: Floats, layers: int) -> Floats:
    """Seconds from the first byte on until the last layer is computed."""
    return np.maximum(load / layers + compute, load + compute / layers)


def _copied(hit: Hit, read: Floats, copy: Link) -> Floats:
    """When the first 1, 2, ... blocks are with the engine, each copied once it has been read and
    those before it were copied: `end(i) = max(end(i - 1), read(i)) + each`, in closed form."""
    each_s = hit.block_bytes / copy.bytes_per_s
    before = np.arange(len(read) - 1, dtype=np.float64) * each_s
    start = np.maximum.accumulate(read[1:] - before)
    queue_s = copy.queued_bytes / copy.bytes_per_s
    return copy.latency_s + each_s + before + np.maximum(start, queue_s)


def break_even_bytes_per_s(prefill: Prefill, tokens: int, bytes_per_token: float) -> float:
    """The bandwidth at which loading a prefix takes as long as computing it (FAST'25, eq. 2:
    with `Prefill.of_model` it is `2 d s flops / (gqa (a p d + b d^2))`, whatever the layers)."""
    return tokens * bytes_per_token / prefill.seconds(0, tokens)
