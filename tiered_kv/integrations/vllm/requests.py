"""What the scheduler's side remembers of a request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiered_kv.integrations.vllm.asking import Answer, Question
from tiered_kv.integrations.vllm.hints import Hints
from tiered_kv.integrations.vllm.plans import Span
from tiered_kv.types import BlockKey, Lease

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Tracked:
    """`kept` leading blocks are held by the node or on their way there. While `loading`, the
    engine's pages are being filled and `keys` (of rank 0) are what others wait for."""

    request: "Request"
    hints: Hints
    question: Question | None = None
    answer: Answer | None = None
    have: int = 0  # pages that the engine had when it last asked
    kept: int = 0
    loading: bool = False
    keys: tuple[BlockKey, ...] = ()
    pages: frozenset[int] = frozenset()  # of the engine, that its load fills
    by_layer: bool = False  # what the engine was told of its load: it waits in the very step
    unsure: int = 0  # leading tokens whose load by layers may still turn out to have failed
    never: bool = False  # a load has failed, or took too long to be found: compute
    waited_s: float = 0.0  # since when it waits for another request's load or save; 0: it does not

    @property
    def hashes(self) -> Sequence[bytes]:
        """The engine's chained hashes of complete pages, so far."""
        hashes: Sequence[bytes] = self.request.block_hashes
        return hashes


def spans(pages: Sequence[int], first_page: int, group: int) -> tuple[Span, ...]:
    """Engine pages `pages`, of which the first is the request's page `first_page`, as parts of
    blocks of `group` pages."""
    out: list[Span] = []
    at = first_page
    left = list(pages)
    while left:
        inside = at % group
        n = min(group - inside, len(left))
        out.append(Span(inside, tuple(left[:n])))
        left = left[n:]
        at += n
    return tuple(out)


def run_of(answer: Answer, rank: int) -> tuple[BlockKey, ...]:
    """The blocks that an answer found on a rank, the incomplete one behind them included."""
    ask, found = answer.asks[rank], answer.found
    run = ask.run[: found.blocks]
    return (*run, ask.tails[found.blocks][found.tail - 1]) if found.tail else run


def cut(lease: Lease, start: int, n: int) -> Lease:
    """The part of a lease from its block `start` on, at most `n` blocks. It ends with the whole."""
    part = slice(start, start + n)
    return replace(
        lease, keys=lease.keys[part], slots=lease.slots[part], generations=lease.generations[part]
    )
