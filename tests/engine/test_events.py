"""Block events of a node as vLLM's KV events: a router that applies them knows what is where."""

import random

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tiered_kv.errors import BadInput
from tiered_kv.integrations.vllm.events import EventTranslator
from tiered_kv.types import BlockKey, Medium
from tiered_kv.wire import BlockEvent, Events

PAGE = 4
A, B, C, D = (BlockKey(bytes([i]) * 16) for i in range(1, 5))
DRAM, NVME = Medium.DRAM, Medium.NVME


def batch(first, next_, items=()):
    return Events(first, next_, tuple(BlockEvent(*item) for item in items))


def page(i):
    return bytes([i]) * 32


def ext(i):
    return maybe_convert_block_hash(page(i))


def note(translator, key, pages, parent=None, **more):
    tokens = [i * 100 + j for i in pages for j in range(PAGE)]
    translator.note(key, [page(i) for i in pages], page(parent) if parent else None, tokens, **more)


class Node:
    """Numbers events as a node does, and tells all it holds to who has missed some."""

    def __init__(self):
        self.first = self.next = 1000
        self.kept = []
        self.where = {}

    def happen(self, key, medium, stored):
        here = self.where.setdefault(key, set())
        (here.add if stored else here.discard)(medium)
        self.kept.append((self.next, key, medium, stored))
        self.next += 1

    def lose(self, n):
        del self.kept[:n]
        self.first = self.kept[0][0] if self.kept else self.next

    def events(self, since):
        if self.first <= since <= self.next:
            return batch(since, self.next, [e for e in self.kept if e[0] >= since])
        held = [(self.next, k, m, True) for k, media in self.where.items() for m in media]
        return batch(self.next, self.next, held)


class Router:
    """What a router makes of the events. Fails for what no router could make sense of."""

    def __init__(self):
        self.pages = {"CPU": {}, "STORAGE": {}}

    def apply(self, events):
        for event in events:
            held = self.pages[event.medium]
            assert event.block_hashes
            assert len(set(event.block_hashes)) == len(event.block_hashes)
            if isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    del held[one]  # announced before, and not removed since
                continue
            assert isinstance(event, BlockStored)
            assert event.block_size == PAGE
            assert len(event.token_ids) == PAGE * len(event.block_hashes)
            parent = event.parent_block_hash
            for i, one in enumerate(event.block_hashes):
                assert one not in held
                held[one] = parent, tuple(event.token_ids[i * PAGE : (i + 1) * PAGE])
                parent = one


def told(translator, *items, first=0):
    numbered = tuple((first + i, *item) for i, item in enumerate(items))
    return translator.translate(batch(first, first + len(items), numbered))


def test_a_block_is_announced_with_all_its_pages_as_the_engine_itself_does():
    translator = EventTranslator(PAGE, 8)
    extra = [(("lora", "tuned"), ("salt", "s")), (("mm", "image", 3),)]
    note(translator, A, [2, 3], parent=1, lora_id=7, lora_name="tuned", extra=extra)
    (event,) = told(translator, (A, DRAM, True))
    assert event == BlockStored(
        block_hashes=[ext(2), ext(3)],
        parent_block_hash=ext(1),
        token_ids=[200, 201, 202, 203, 300, 301, 302, 303],
        block_size=PAGE,
        lora_id=7,
        medium="CPU",
        lora_name="tuned",
        extra_keys=[("tuned", "s"), (("image", 3),)],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def test_hashes_are_bytes_where_the_engine_publishes_bytes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [2], parent=1)
    (event,) = told(translator, (A, NVME, True))
    assert (event.block_hashes, event.parent_block_hash) == ([page(2)], page(1))
    (event,) = told(translator, (A, NVME, False), first=1)
    assert event == BlockRemoved(block_hashes=[page(2)], medium="STORAGE", group_idx=0)


def test_each_medium_is_announced_and_removed_by_itself():
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [1])
    events = told(translator, (A, DRAM, True), (A, NVME, True))
    assert [event.medium for event in events] == ["CPU", "STORAGE"]
    (event,) = told(translator, (A, DRAM, False), first=2)
    assert event == BlockRemoved(block_hashes=[ext(1)], medium="CPU", group_idx=0)
    (event,) = told(translator, (A, NVME, False), first=3)
    assert event.medium == "STORAGE"


def test_media_that_no_engine_reaches_through_its_host_are_not_told():
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [1])
    assert told(translator, (A, Medium.HBM, True), (A, Medium.HOST, True)) == []


def test_a_block_that_left_and_came_back_within_a_batch_is_not_mentioned():
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [1])
    assert len(told(translator, (A, DRAM, True))) == 1
    assert told(translator, (A, DRAM, False), (A, DRAM, True), first=1) == []
    note(translator, B, [2])
    assert told(translator, (B, DRAM, True), (B, DRAM, False), first=3) == []


def test_a_block_that_is_noted_after_its_event_is_announced_with_the_next_batch():
    translator = EventTranslator(PAGE, 8)
    assert told(translator, (A, DRAM, True), (B, DRAM, True), (B, DRAM, False)) == []
    note(translator, A, [1])
    note(translator, B, [2])
    (event,) = told(translator, first=3)
    assert event.block_hashes == [ext(1)]


def test_what_was_there_before_the_first_event_is_announced_when_it_is_noted():
    node, translator = Node(), EventTranslator(PAGE, 8)
    node.happen(A, DRAM, True)
    node.happen(A, NVME, True)
    node.lose(2)
    assert translator.translate(node.events(translator.since)) == []
    note(translator, A, [1])
    events = translator.translate(node.events(translator.since))
    assert [event.medium for event in events] == ["CPU", "STORAGE"]


def test_places_of_blocks_that_nobody_notes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("tiered_kv.integrations.vllm.events.MAX_STRAYS", 2)
    translator = EventTranslator(PAGE, 8)
    assert told(translator, *((key, DRAM, True) for key in (A, B, C))) == []
    for key, at in ((A, 1), (B, 2), (C, 3)):
        note(translator, key, [at])
    assert [event.block_hashes for event in told(translator, first=3)] == [[ext(2)], [ext(3)]]


def test_parents_come_before_their_children_whatever_order_they_were_noted_and_stored_in():
    translator = EventTranslator(PAGE, 8)
    note(translator, C, [3], parent=2)
    note(translator, A, [1])
    note(translator, B, [2], parent=1)
    events = told(translator, (B, DRAM, True), (C, DRAM, True), (A, DRAM, True))
    assert [event.block_hashes for event in events] == [[ext(1)], [ext(2)], [ext(3)]]


def test_removals_of_a_medium_are_one_event():
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [1])
    note(translator, B, [2, 3], parent=1)
    told(translator, (A, DRAM, True), (B, DRAM, True))
    (event,) = told(translator, (B, DRAM, False), (A, DRAM, False), first=2)
    assert event == BlockRemoved(block_hashes=[ext(2), ext(3), ext(1)], medium="CPU", group_idx=0)


def test_pages_that_blocks_share_are_told_once_and_removed_with_the_last_block():
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [1, 2])
    note(translator, B, [1, 2, 3, 4])
    first, second = told(translator, (A, DRAM, True), (B, DRAM, True))
    assert (first.block_hashes, first.parent_block_hash) == ([ext(1), ext(2)], None)
    assert (second.block_hashes, second.parent_block_hash) == ([ext(3), ext(4)], ext(2))
    assert second.token_ids == [300, 301, 302, 303, 400, 401, 402, 403]
    assert told(translator, (A, DRAM, False), first=2) == []
    (event,) = told(translator, (B, DRAM, False), first=3)
    assert event.block_hashes == [ext(1), ext(2), ext(3), ext(4)]


def test_a_block_whose_pages_are_all_known_is_no_event():
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [1, 2])
    note(translator, B, [1])
    assert len(told(translator, (A, DRAM, True), (B, DRAM, True))) == 1
    (event,) = told(translator, (A, DRAM, False), first=2)
    assert event.block_hashes == [ext(2)]


def test_what_is_forgotten_is_removed_and_announced_again_when_it_is_noted_again():
    translator = EventTranslator(PAGE, 2)
    for key, at in ((A, 1), (B, 2), (C, 3)):
        note(translator, key, [at])
        events = told(translator, (key, DRAM, True), first=at - 1)
    assert len(translator) == 2
    removed, stored = events
    assert removed == BlockRemoved(block_hashes=[ext(1)], medium="CPU", group_idx=0)
    assert stored.block_hashes == [ext(3)]
    note(translator, A, [1])
    removed, stored = told(translator, first=3)
    assert (removed.block_hashes, stored.block_hashes) == ([ext(2)], [ext(1)])


def test_a_note_that_is_repeated_is_the_last_to_be_forgotten():
    translator = EventTranslator(PAGE, 2)
    note(translator, A, [1])
    note(translator, B, [2])
    note(translator, A, [1])
    note(translator, C, [3])
    assert [e.block_hashes for e in told(translator, *((k, DRAM, True) for k in (A, B, C)))] == [
        [ext(1)], [ext(3)],
    ]  # fmt: skip


def test_who_missed_events_is_told_only_what_differs():
    node, translator, router = Node(), EventTranslator(PAGE, 8), Router()
    note(translator, A, [1])
    note(translator, B, [2], parent=1)
    for key in (A, B):
        node.happen(key, DRAM, True)
    router.apply(translator.translate(node.events(translator.since)))
    node.happen(B, DRAM, False)
    node.happen(A, NVME, True)
    node.lose(3)
    events = translator.translate(node.events(translator.since))
    assert [(type(e), e.medium, e.block_hashes) for e in events] == [
        (BlockRemoved, "CPU", [ext(2)]), (BlockStored, "STORAGE", [ext(1)]),
    ]  # fmt: skip


def test_all_is_removed_when_the_node_is_lost_and_told_again_when_it_is_back():
    node, translator, router = Node(), EventTranslator(PAGE, 8), Router()
    note(translator, A, [1])
    node.happen(A, DRAM, True)
    router.apply(translator.translate(node.events(translator.since)))
    events = translator.lost()
    assert not any(isinstance(event, AllBlocksCleared) for event in events)  # GPU pages stay
    router.apply(events)
    assert router.pages == {"CPU": {}, "STORAGE": {}}
    assert translator.lost() == []
    router.apply(translator.translate(node.events(translator.since)))
    assert list(router.pages["CPU"]) == [ext(1)]


def test_another_life_of_the_node_is_believed_as_a_whole():
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [1])
    note(translator, B, [2])
    told(translator, (A, DRAM, True))
    removed, stored = translator.translate(batch(9000, 9000, [(9000, B, NVME, True)]))
    assert (removed.block_hashes, stored.block_hashes) == ([ext(1)], [ext(2)])
    assert translator.since == 9000


def test_events_that_come_twice_change_nothing():
    translator = EventTranslator(PAGE, 8)
    note(translator, A, [1])
    assert len(told(translator, (A, DRAM, True), (A, DRAM, False), (A, DRAM, True))) == 1
    repeated = ((0, A, DRAM, True), (1, A, DRAM, False), (2, A, DRAM, True))
    assert translator.translate(batch(0, 3, repeated)) == []
    assert translator.translate(batch(0, 3, repeated[:2])) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_router_always_ends_up_with_what_the_node_holds_of_the_noted_blocks(seed):
    rng = random.Random(seed)
    node, router, translator = Node(), Router(), EventTranslator(PAGE, 12)
    blocks = {}  # key: pages, parent; twins share leading pages
    for i in range(30):
        parent, twin = rng.choice([None, *blocks]), rng.choice([None, None, *blocks])
        fresh = list(range(2 * i + 1, 2 * i + 3))
        if twin is not None:
            pages, parent_page = [*blocks[twin][0][:1], *fresh[1:]], blocks[twin][1]
        else:
            pages, parent_page = fresh, blocks[parent][0][-1] if parent else None
        blocks[BlockKey(bytes([i + 1]) * 16)] = pages, parent_page
    noted = {}
    for _ in range(400):
        key = rng.choice(list(blocks))
        match rng.randrange(8):
            case 0 | 1:
                note(translator, key, blocks[key][0], parent=blocks[key][1])
                noted.pop(key, None)
                noted[key] = None
                while len(noted) > translator.capacity:
                    del noted[next(iter(noted))]
            case 2 | 3 | 4 | 5:
                node.happen(key, rng.choice([DRAM, NVME]), rng.random() < 0.6)
            case 6:
                router.apply(translator.translate(node.events(translator.since)))
                node.lose(len(node.kept))
            case 7 if rng.random() < 0.2:
                node.lose(rng.randrange(len(node.kept) + 1))
    router.apply(translator.translate(node.events(translator.since)))
    for medium, name in ((DRAM, "CPU"), (NVME, "STORAGE")):
        here = {k for k in noted if medium in node.where.get(k, ())}
        assert set(router.pages[name]) == {ext(i) for key in here for i in blocks[key][0]}
        for i, (_, tokens) in router.pages[name].items():
            (number,) = {p for key in here for p in blocks[key][0] if ext(p) == i}
            assert tokens == tuple(number * 100 + j for j in range(PAGE))
    assert len(translator) == len(noted)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_hashes": []}, "8 tokens are not 0 pages of 4"),
        ({"token_ids": [1, 2, 3]}, "3 tokens are not 2 pages of 4"),
        ({"token_ids": [1, 2, 3, 4, 5, 6, 7, -1]}, "tokens must be integers"),
        ({"extra": [None]}, "1 entries of extra keys came with 2 pages"),
    ],
)
def test_a_note_that_does_not_fit_together_is_refused_and_changes_nothing(changed, message):
    translator = EventTranslator(PAGE, 8)
    good = {"page_hashes": [page(1), page(2)], "parent_hash": None, "token_ids": list(range(8))}
    with pytest.raises(BadInput, match=message):
        translator.note(A, **(good | changed))
    assert len(translator) == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_must_be_positive_integers(value):
    with pytest.raises(BadInput, match="page_tokens must be a positive integer"):
        EventTranslator(value, 8)
    with pytest.raises(BadInput, match="capacity must be a positive integer"):
        EventTranslator(PAGE, value)
