"""Load a hit from a slower tier, or compute it again: whichever is modelled to be faster.

Pure arithmetic over what was measured: the tier's bandwidth, latency and queue, and the GPU's
prefill rate. A decision is never modelled slower than recomputing everything, nor than loading
everything. Tokens, bytes and seconds throughout.
"""

from dataclasses import dataclass

from tiered_kv.errors import BadInput


@dataclass(frozen=True, slots=True)
class Link:
    """A tier as measured: `queued_bytes` are ahead of us on it."""

    bytes_per_s: float
    latency_s: float = 0.0
    queued_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s >= 0 and self.latency_s >= 0 and self.queued_bytes >= 0):
            raise BadInput(f"a link has no negative measures, and {self} has")

    def wait_s(self) -> float:
        """Until the first of our bytes moves."""
        if not self.bytes_per_s:
            return float("inf")
        return self.latency_s + self.queued_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Prefill:
    """A GPU as measured: tokens from position `a` to `b` take `linear_s * (b - a) +
    quadratic_s * (b**2 - a**2)` seconds; the second term is attention to all that is before."""

    linear_s: float
    quadratic_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.linear_s >= 0 and self.quadratic_s >= 0):
            raise BadInput(f"prefill takes no negative time, and {self} does")

    def seconds(self, start: int, end: int) -> float:
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

    The estimates run from the decision until the last token of the prompt is computed, which is
    what the policy can change about the time to the first token.
    """

    load: int
    recompute: int
    seconds: float
    load_all_s: float
    recompute_all_s: float


@dataclass(frozen=True, slots=True)
class Hit:
    """What was found: `blocks` leading blocks, and `new_tokens` behind them that nobody has.

    `layers` above 1 says that the engine computes a layer as soon as that layer has been loaded.
    """

    blocks: int
    block_tokens: int
    block_bytes: int
    new_tokens: int = 1
    layers: int = 1

    def __post_init__(self) -> None:
        if min(self.blocks, self.new_tokens) < 0 or min(
            self.block_tokens, self.block_bytes, self.layers
        ) < 1:  # fmt: skip
            raise BadInput(f"{self} cannot be a hit")


def decide(hit: Hit, link: Link, prefill: Prefill) -> Decision:
    """How much of the hit to load. O(log blocks).

    Recomputing wins a tie: it needs nobody else.
    """
    candidates = _candidates(hit, link, prefill)  # ascending, and `min` takes the first of equals
    best = min(candidates, key=lambda load: modelled_s(load, hit, link, prefill))
    return Decision(
        load=best,
        recompute=hit.blocks - best,
        seconds=modelled_s(best, hit, link, prefill),
        load_all_s=modelled_s(hit.blocks, hit, link, prefill),
        recompute_all_s=modelled_s(0, hit, link, prefill),
    )


def modelled_s(load: int, hit: Hit, link: Link, prefill: Prefill) -> float:
    """Seconds when `load` blocks are loaded and all others are computed.

    Loading and computing are a pipeline of two stages over the layers: the first layer must be
    loaded, the last computed, and in between the slower of both sets the pace. With one layer
    that is their sum.
    """
    start = load * hit.block_tokens
    compute = prefill.seconds(start, hit.blocks * hit.block_tokens + hit.new_tokens)
    if load == 0:
        return compute
    if not link.bytes_per_s:
        return float("inf")
    copy = load * hit.block_bytes / link.bytes_per_s
    pace = max(copy, compute) * (hit.layers - 1) / hit.layers
    return link.wait_s() + (copy + compute) / hit.layers + pace


def break_even_bytes_per_s(prefill: Prefill, tokens: int, bytes_per_token: float) -> float:
    """The bandwidth at which loading a prefix takes as long as computing it (FAST'25, eq. 2:
    with `Prefill.of_model` it is `2 d s flops / (gqa (a p d + b d^2))`, whatever the layers)."""
    return tokens * bytes_per_token / prefill.seconds(0, tokens)


def _candidates(hit: Hit, link: Link, prefill: Prefill) -> list[int]:
    """Where the least of `modelled_s` can be.

    Copying grows with the number of loaded blocks and computing shrinks, so they cross once. On
    both sides the time is concave (its only curve is `-start**2`), so that its least value is at
    an end: nothing, one block, the two around the crossing, everything.
    """
    if not hit.blocks or not link.bytes_per_s:
        return [0]
    low, high = 1, hit.blocks
    total = hit.blocks * hit.block_tokens + hit.new_tokens
    while low < high:  # the first number of blocks whose copy takes no less than the rest
        middle = (low + high) // 2
        copy = middle * hit.block_bytes / link.bytes_per_s
        if copy >= prefill.seconds(middle * hit.block_tokens, total):
            high = middle
        else:
            low = middle + 1
    return sorted({0, 1, max(1, low - 1), low, hit.blocks})


class Meter:
    """Measured bandwidth and latency of one tier, as a moving average over bytes.

    Feed it with every batch that was read, prefetches and probes too: a tier that is no longer
    loaded from would otherwise never be found to have recovered.
    """

    __slots__ = ("_bytes", "_memory", "_seconds", "latency_s")

    def __init__(
        self, bytes_per_s: float, latency_s: float = 0.0, memory_bytes: float = 1 << 30
    ) -> None:
        """Start from what the tier's self-test measured. About `memory_bytes` are remembered."""
        if not (bytes_per_s > 0 and memory_bytes > 0):
            raise BadInput(f"a meter starts from a positive rate, not {bytes_per_s}")
        self._memory = memory_bytes
        self._bytes = memory_bytes
        self._seconds = memory_bytes / bytes_per_s
        self.latency_s = latency_s

    @property
    def bytes_per_s(self) -> float:
        """The rate of about the last `memory_bytes`."""
        return self._bytes / self._seconds

    def note(self, nbytes: int, seconds: float) -> None:
        """A batch of `nbytes` took `seconds` from its start to its end, latency included."""
        if nbytes <= 0 or seconds <= 0:
            return
        keep = max(0.0, 1.0 - nbytes / self._memory)
        self._bytes = keep * self._bytes + nbytes
        self._seconds = keep * self._seconds + max(seconds - self.latency_s, 1e-9)

    def link(self, queued_bytes: float) -> Link:
        """What `decide` asks for, with so many bytes ahead in the tier's queue."""
        return Link(self.bytes_per_s, self.latency_s, queued_bytes)
