"""What all ranks of an engine hold of a request, and what is worth loading of it. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.errors import BadInput
from tiered_kv.hierarchy.book import ABSENT, Book
from tiered_kv.inputs import check_run, short
from tiered_kv.pace import Pace
from tiered_kv.policies.links import Link
from tiered_kv.policies.load_or_recompute import IN_POOL, Decision, Hit, Prefill, decide
from tiered_kv.types import BlockKey, Held, Medium, Run
from tiered_kv.wire import Ask

SLOWNESS = {medium: place for place, medium in enumerate(Medium)}


@dataclass(frozen=True, slots=True)
class Match:
    """`runs` has for each rank the keys that every rank holds, from the first block on and with
    the tail; `media` the slowest tier of each among the ranks. `torn` has for each rank what it
    holds beyond that, in prefix order: nobody can use it."""

    blocks: int
    tail: int
    runs: tuple[tuple[BlockKey, ...], ...]
    media: tuple[Medium, ...]
    torn: tuple[tuple[BlockKey, ...], ...]


def check_asks(asks: object) -> tuple[Ask, ...]:
    """Ranks that ask for the same number of blocks. The tails are checked where they are looked
    at: there are many. O(keys). Raises `BadInput`."""
    if not isinstance(asks, list | tuple) or not asks:
        raise BadInput(f"asks must be one Ask a rank, not {short(asks)}")
    for ask in asks:
        if not isinstance(ask, Ask):
            raise BadInput(f"an ask must be an Ask, not {short(ask)}")
        check_run(ask.run)
        if not isinstance(ask.tails, list | tuple):
            raise BadInput(f"tails must be lists of keys, not {short(ask.tails)}")
        if len(ask.tails) not in (0, len(ask.run), len(ask.run) + 1):
            raise BadInput(f"{len(ask.run)} blocks came with {len(ask.tails)} lists of tails")
    for what in ("run", "tails"):
        counts = [len(getattr(ask, what)) for ask in asks]
        if len(set(counts)) > 1:
            raise BadInput(f"the ranks ask with {what} of {counts} blocks, not all the same")
    return tuple(asks)


def places(book: Book, run: Run) -> list[Medium]:
    """Where each of the leading held blocks of a run is read from; one that is on its way up
    counts where it comes from. 0.2 us a block."""
    get, coming, found = book.blocks.get, book.coming, list[Medium]()
    for key in run:
        block = get(key)
        if block is None or (answer := block.answer) is ABSENT:
            break
        if answer is coming:
            answer = book.answers[block.mask]
        if isinstance(answer, Held):
            found.append(answer.tiers[0])
        elif book.below:
            found.append(Medium.HOST)
        else:
            break  # the tier that it was to come from was taken out
    return found


def match(book: Book, asks: Sequence[Ask], skip: int) -> Match:
    """What every rank holds, and what only some do. `skip` leading blocks need not be held.
    Raises `BadInput` for tails behind the hit that are none."""
    seen = [places(book, ask.run) for ask in asks]
    blocks = min(map(len, seen))
    tail, behind = _tail(book, asks, blocks)
    if blocks < skip:
        tail = 0  # the engine is further than that
    columns = [column[:blocks] for column in seen]
    if tail:
        columns = [[*column, last] for column, last in zip(columns, behind, strict=True)]
    media = columns[0] if len(asks) == 1 else [max(at, key=SLOWNESS.__getitem__)
                                               for at in zip(*columns, strict=True)]  # fmt: skip
    runs = [
        (*ask.run[:blocks], ask.tails[blocks][tail - 1]) if tail else tuple(ask.run[:blocks])
        for ask in asks
    ]
    torn = _torn(book, asks, seen, blocks) if len(asks) > 1 else ((),)
    return Match(blocks, tail, tuple(runs), tuple(media), torn)


def _tail(book: Book, asks: Sequence[Ask], blocks: int) -> tuple[int, list[Medium]]:
    """The longest tail behind so many blocks that every rank holds, and where each has it."""
    if len(asks[0].tails) <= blocks:
        return 0, []
    for ask in asks:
        check_run(ask.tails[blocks])
    counts = [len(ask.tails[blocks]) for ask in asks]
    if len(set(counts)) > 1:
        raise BadInput(f"the ranks know {counts} tails of block {blocks}, not all the same number")
    for i in range(len(asks[0].tails[blocks]), 0, -1):
        where = [places(book, (ask.tails[blocks][i - 1],)) for ask in asks]
        if all(where):
            return i, [at[0] for at in where]
    return 0, []


def _torn(
    book: Book, asks: Sequence[Ask], seen: Sequence[Sequence[Medium]], blocks: int
) -> tuple[tuple[BlockKey, ...], ...]:
    beyond = [list(ask.run[blocks : len(at)]) for ask, at in zip(asks, seen, strict=True)]
    if len(asks[0].tails) > blocks:
        for names in zip(*(ask.tails[blocks] for ask in asks), strict=True):
            held = [name in book.blocks for name in names]
            if any(held) and not all(held):
                for rest, name, here in zip(beyond, names, held, strict=True):
                    rest += [name] if here else []
    return tuple(map(tuple, beyond))


def coming_bytes(book: Book, run: Run) -> Counter[Medium]:
    """Bytes of a run that wait in the lanes up, by where they come from."""
    found: Counter[Medium] = Counter()
    for block in book.live(run):
        if block.answer is book.coming:
            held = book.answers[block.mask]
            found[held.tiers[0] if isinstance(held, Held) else Medium.HOST] += block.nbytes
    return found


def links(paces: Mapping[Medium, Pace], mine: Mapping[Medium, int]) -> dict[Medium, Link]:
    """Each leg up as `decide` sees it, the asker's own bytes not counted as ahead of it."""
    return {medium: pace.link(mine.get(medium, 0)) for medium, pace in paces.items()}


def weigh(
    media: Sequence[Medium], legs: Mapping[Medium, Link], *, block_tokens: int, block_bytes: int,
    before: int, new_tokens: int, prefill: Prefill, copy: Link | None,
) -> Decision:  # fmt: skip
    """How many of these blocks to load; `before` blocks precede them, `block_bytes` are those of
    all ranks together. What lies in no leg is in the pool."""
    index = {medium: i for i, medium in enumerate(legs)}
    hit = Hit(
        len(media), block_tokens, block_bytes, new_tokens,
        where=tuple([index.get(medium, IN_POOL) for medium in media]),
        before_tokens=before * block_tokens,
    )  # fmt: skip
    return decide(hit, tuple(legs.values()), prefill, copy)


def read_s(media: Sequence[Medium], legs: Mapping[Medium, Link], block_bytes: int) -> float:
    """Seconds until these blocks are in the pool, the tiers being read side by side."""
    return max(
        (legs[medium].wait_s() + n * block_bytes / legs[medium].bytes_per_s
         for medium, n in Counter(media).items() if medium in legs),
        default=0.0,
    )  # fmt: skip
