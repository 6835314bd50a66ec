"""What the outcome of a move changes."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.hierarchy.book import Book
from tiered_kv.hierarchy.state import Block, TierState
from tiered_kv.types import Done, Failed, Medium, Move, Outcome, Why

UNREADABLE = (Why.IO_ERROR, Why.ABSENT)
"""A lower copy that could not be read for one of these is not promised again."""


@dataclass(slots=True)
class Flight:
    """A move under way."""

    move: Move
    blocks: list[Block]
    leaving: set[Block]  # the ones whose upper copy goes once the lower one is there


class Landing:
    """Takes the results of moves into the ledger. A failed copy leaves its source where it was."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def land(self, flight: Flight, outcomes: Sequence[Outcome]) -> None:
        """File what arrived where, and let go of what may leave; one outcome a block."""
        book, move = self._book, flight.move
        source = None if move.source is Medium.HOST else book.tier(move.source)
        target = None if move.target is Medium.HOST else book.tier(move.target)
        if target is not None:
            target.reserved -= move.nbytes * len(move.targets)
        if source is not None and flight.leaving:
            source.leaving[move.nbytes] -= len(flight.leaving)
        arrived: list[Block] = []
        failed: list[tuple[Block, Failed]] = []
        safe = target.online if target is not None else book.sinks  # where the copies are now
        for i, (block, outcome) in enumerate(zip(flight.blocks, outcomes, strict=True)):
            block.move = 0
            book.unpin(block)
            book.answer(block)
            if isinstance(outcome, Done) and not block.gone:
                arrived.append(block)
                if outcome.checksum is not None:
                    block.checksum = outcome.checksum
                if target is not None:
                    book.hold(block, target, move.targets[i])
                continue
            if target is not None:
                target.slots.give(move.nbytes, (move.targets[i],))
            if isinstance(outcome, Failed):
                failed.append((block, outcome))
        if target is not None:
            # demoted blocks lie in the order in which they were to leave, heads last
            before = _ancestors(arrived, target.bit)
            target.policy.admit([b.key for b in arrived], [b.key for b in before])
        if safe:
            self._leave([b for b in arrived if b in flight.leaving], source, target)
        book.count(f"moved.{move.source}-{move.target}", len(arrived))
        for block, why in failed:  # last: what a lost block takes along must be on file
            self._failed(block, why, source)

    def _leave(
        self, blocks: list[Block], source: TierState | None, target: TierState | None
    ) -> None:
        if source is None:
            return
        for block in blocks:
            if block.pins:
                continue  # somebody reads it
            if target is None:
                self._book.drop(block)  # the node below has it now
            else:
                self._book.lose(block, source)
            self._book.count(f"evicted.{source.spec.medium}")

    def _failed(self, block: Block, failed: Failed, source: TierState | None) -> None:
        """A copy that turned out bad leaves; a failed copy of a good one changes nothing."""
        book = self._book
        book.count(f"failed.{failed.why}")
        if block.gone:
            return
        bad = failed.why is Why.CORRUPT or (failed.why in UNREADABLE and source is not book.top)
        if bad and source is not None and block.mask & source.bit:
            if block.mask == source.bit or block.pins:
                # a reader of the bad copy keeps its slot, nobody else finds it
                book.count(f"dropped.{failed.why}", book.drop(block))
            else:
                book.lose(block, source)
        elif not block.mask:
            book.drop(block)  # it was to come from below, and did not
        elif failed.why is Why.ORPHANED and not block.pins and book.orphaned(block):
            # The node below lacks its parent, and so do we: nobody can hit it, and asking again
            # would fail again, for ever in the way of what can leave.
            book.count(f"dropped.{failed.why}", book.drop(block))


def _ancestors(blocks: list[Block], bit: int) -> list[Block]:
    """What these blocks descend from in a tier, heads first: a run that arrives in several moves
    must not leave its head older than its tail."""
    seen = set(blocks)
    found: list[Block] = []
    for block in blocks:
        chain: list[Block] = []
        one = block.parent
        while one is not None and one not in seen:
            seen.add(one)
            if one.mask & bit:
                chain.append(one)
            one = one.parent
        found += reversed(chain)
    return found
