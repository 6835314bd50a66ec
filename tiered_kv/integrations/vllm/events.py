"""Block events of a node as vLLM's KV events, for routers that follow engines. Pure.

The node names blocks by keys of ours; routers know pages by the engine's own hashes. So an engine
notes for each block that it stored or loaded which pages it stands for, and only noted blocks are
announced. Media have vLLM's names, since routers compare them: DRAM is "CPU", NVMe is "STORAGE".

Blocks may share leading pages (two prompts that part inside a block, an incomplete block and the
one that followed it). A page is announced when the first block with it arrives in a medium and
removed when the last one leaves, so routers that count announcements and routers that do not are
both right.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, to_event_extra_keys

from tiered_kv.errors import BadInput
from tiered_kv.types import BlockKey, Medium

if TYPE_CHECKING:
    from tiered_kv.wire import Events

GROUP = 0
"""Blocks of ours hold plain full attention, the only KV cache group of such a model."""
KIND = "full_attention"
NAMES = {1: MEDIUM_CPU, 2: MEDIUM_STORAGE}
"""vLLM's name of each medium that an engine reaches through its host's node, by its bit."""
BITS = {Medium.DRAM: 1, Medium.NVME: 2}

MAX_STRAYS = 1 << 17
"""Blocks whose place is remembered before anybody noted them, about 150 bytes each. One that is
not is announced with its next event only: a router may think too little of a node."""

ExtraKeys = Sequence[tuple[Any, ...] | None]


@dataclass(slots=True)
class _Note:
    """What a block is to the engine, where it is, and what has been told of that."""

    pages: tuple[bytes, ...]
    parent: bytes | None
    tokens: "array[int]"  # a list would take nine times the memory
    lora_id: int | None
    lora_name: str | None
    extra: ExtraKeys | None
    here: int = 0
    told: int = 0


class EventTranslator:
    """Follows one node for one engine. Not thread-safe; all calls are fast and none blocks.

    Holds at most `capacity` notes, about 3 KB for a block of 256 tokens, and forgets the least
    recently noted first. What is forgotten is announced as removed: a router may think too little
    of a node, and never too much for long.
    """

    def __init__(self, page_tokens: int, capacity: int) -> None:
        """`page_tokens` is the engine's block size, `capacity` a number of blocks of ours. Raises
        `BadInput`."""
        for name, value in (("page_tokens", page_tokens), ("capacity", capacity)):
            if type(value) is not int or value < 1:
                raise BadInput(f"{name} must be a positive integer, not {value!r}")
        self.page_tokens = page_tokens
        self.capacity = capacity
        self.since = 0
        """The number to ask the node's `events` for next."""
        self._notes: OrderedDict[BlockKey, _Note] = OrderedDict()
        self._strays: OrderedDict[BlockKey, int] = OrderedDict()  # where other blocks are
        self._due: dict[BlockKey, None] = {}
        self._holders: Counter[tuple[int, bytes]] = Counter()
        self._late: list[KVCacheEvent] = []  # removals of what was forgotten meanwhile

    def __len__(self) -> int:
        return len(self._notes)

    def note(
        self, key: BlockKey, page_hashes: Sequence[bytes], parent_hash: bytes | None,
        token_ids: Sequence[int], lora_id: int | None = None, extra: ExtraKeys | None = None,
        *, lora_name: str | None = None,
    ) -> None:  # fmt: skip
        """A block of ours, as this engine just stored or loaded it: its pages, the page before
        them, and the tokens in them. `extra` are vLLM's extra keys, one entry a page.

        Note a run from its tail on, so that its head is forgotten last. Raises `BadInput`.
        """
        pages = tuple(page_hashes)
        if not pages or len(token_ids) != len(pages) * self.page_tokens:
            raise BadInput(
                f"{len(token_ids)} tokens are not {len(pages)} pages of {self.page_tokens}"
            )
        if extra is not None and len(extra) != len(pages):
            raise BadInput(f"{len(extra)} entries of extra keys came with {len(pages)} pages")
        known = self._notes.get(key)
        if known is not None and known.pages == pages:
            self._notes.move_to_end(key)
            return
        try:
            tokens = array("I", token_ids)
        except (TypeError, OverflowError) as error:
            raise BadInput(f"tokens must be integers from 0 to 2**32-1: {error}") from None
        if known is not None:
            self._forget(key)
        here = self._strays.pop(key, 0)
        self._notes[key] = _Note(pages, parent_hash, tokens, lora_id, lora_name, extra, here)
        self._due[key] = None
        while len(self._notes) > self.capacity:
            self._forget(next(iter(self._notes)))

    def translate(self, events: "Events") -> list[KVCacheEvent]:
        """What a batch of the node's events, and notes since the last one, change for routers.

        Only the outcome of a batch is told: a block that left and came back is not mentioned, and
        where events were missed only what differs from what was announced before.
        """
        if not events.first <= self.since <= events.next:
            self._unknown()  # the batch tells all that is held
        for event in events.items:
            bit = BITS.get(event.medium, 0)
            if bit and event.number >= self.since:
                self._place(event.key, bit, event.stored)
        self.since = events.next
        return self._changes()

    def lost(self) -> list[KVCacheEvent]:
        """The node does not answer: all that was announced is removed. What it still holds is
        announced again when it does."""
        self._unknown()
        return self._changes()

    def _unknown(self) -> None:
        self.since = 0
        self._strays.clear()
        for key, note in self._notes.items():
            note.here = 0
            self._due[key] = None

    def _place(self, key: BlockKey, bit: int, stored: bool) -> None:
        note = self._notes.get(key)
        if note is not None:
            note.here = note.here | bit if stored else note.here & ~bit
            self._due[key] = None
            return
        here = self._strays.pop(key, 0)
        self._stray(key, here | bit if stored else here & ~bit)

    def _stray(self, key: BlockKey, here: int) -> None:
        if here:
            self._strays[key] = here
            if len(self._strays) > MAX_STRAYS:
                self._strays.popitem(last=False)

    def _forget(self, key: BlockKey) -> None:
        note = self._notes.pop(key)
        for bit in NAMES:
            if note.told & bit:
                _remove(self._late, bit, self._leave(note, bit))
        self._due.pop(key, None)
        self._stray(key, note.here)

    def _changes(self) -> list[KVCacheEvent]:
        """Removals, then arrivals, parents before children."""
        due = [key for key in self._due if self._notes[key].here != self._notes[key].told]
        self._due.clear()
        found, self._late = self._late, []
        for key in due:
            note = self._notes[key]
            for bit in NAMES:
                if note.told & bit and not note.here & bit:
                    _remove(found, bit, self._leave(note, bit))
        for key in self._parents_first(due):
            note = self._notes[key]
            for bit in NAMES:
                if note.here & bit and not note.told & bit:
                    found.extend(self._arrive(note, bit))
        return found

    def _leave(self, note: _Note, bit: int) -> list[bytes]:
        """The pages that no other block has there."""
        note.told &= ~bit
        gone: list[bytes] = []
        for page in note.pages:
            self._holders[bit, page] -= 1
            if not self._holders[bit, page]:
                del self._holders[bit, page]
                gone.append(page)
        return gone

    def _arrive(self, note: _Note, bit: int) -> Iterable[KVCacheEvent]:
        """One event with the pages that no other block has there; none when there are none."""
        note.told |= bit
        shared = sum(1 for _ in takewhile(lambda page: (bit, page) in self._holders, note.pages))
        self._holders.update((bit, page) for page in note.pages)
        if shared == len(note.pages):
            return
        parent = note.pages[shared - 1] if shared else note.parent
        yield BlockStored(
            block_hashes=[maybe_convert_block_hash(page) for page in note.pages[shared:]],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=note.tokens[shared * self.page_tokens :].tolist(),
            block_size=self.page_tokens,
            lora_id=note.lora_id,
            medium=NAMES[bit],
            lora_name=note.lora_name,
            extra_keys=to_event_extra_keys(note.extra[shared:] if note.extra else None),
            group_idx=GROUP,
            kv_cache_spec_kind=KIND,
        )

    def _parents_first(self, keys: Iterable[BlockKey]) -> dict[BlockKey, None]:
        """Routers drop a block whose parent they do not know."""
        ends = {self._notes[key].pages[-1]: key for key in keys}
        ordered: dict[BlockKey, None] = {}
        for key in keys:
            chain: dict[BlockKey, None] = {}
            one: BlockKey | None = key
            while one is not None and one not in ordered and one not in chain:
                chain[one] = None
                parent = self._notes[one].parent
                one = None if parent is None else ends.get(parent)
            ordered.update(dict.fromkeys(reversed(chain)))
        return ordered


def _remove(events: list[KVCacheEvent], bit: int, pages: Sequence[bytes]) -> None:
    """Add a removal of pages, to the last event where that is one of the same medium."""
    hashes = [maybe_convert_block_hash(page) for page in pages]
    last = events[-1] if events else None
    if isinstance(last, BlockRemoved) and last.medium == NAMES[bit]:
        last.block_hashes.extend(hashes)
    elif hashes:
        events.append(BlockRemoved(block_hashes=hashes, medium=NAMES[bit], group_idx=GROUP))
