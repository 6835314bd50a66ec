"""How much of a session a node holds, and how soon it could be in its pool: what routers ask."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered_kv.types import Held, Medium

if TYPE_CHECKING:
    from tiered_kv.node import Node
    from tiered_kv.sessions import Session


@dataclass(frozen=True, slots=True)
class Residence:
    """`tokens` of the session's `n_tokens` are held from its beginning on, `blocks` in each tier;
    those below the pool would be in it after about `bring_s`, by the measured rate of their tier
    and what waits on it."""

    n_tokens: int
    tokens: int
    blocks: dict[Medium, int]
    bring_s: float


def residence(node: "Node", session: "Session") -> Residence:
    """See `Residence`. O(blocks of the session); moves nothing and counts as no use."""
    blocks: dict[Medium, int] = {}
    held = 0
    for answer in node.hierarchy.lookup(session.run):
        if not isinstance(answer, Held):
            break
        held += 1
        blocks[answer.tiers[0]] = blocks.get(answer.tiers[0], 0) + 1
    resident = node.hierarchy.book.live(session.run[:1])
    nbytes = next((block.nbytes for block in resident), 0)
    bring_s = 0.0
    for medium, count in blocks.items():
        if medium in node.mover.paces:
            link = node.mover.paces[medium].link()
            bring_s += link.wait_s() + count * nbytes / link.bytes_per_s
    # A block is as long as any other but the last, which may be incomplete.
    tokens = session.n_tokens * held // len(session.run) if session.run else 0
    return Residence(session.n_tokens, tokens, blocks, bring_s)
