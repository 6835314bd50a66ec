"""What the parts of the vLLM connector meet in tests: links without Ray, small requests, pages."""

import hashlib
import random
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from service_kit import LAYOUT, LONG_S, SECRET, Service, until

from tiered_kv.attachment import Attachment, Mapped
from tiered_kv.errors import Unreachable
from tiered_kv.integrations.vllm.copying import HostCopying
from tiered_kv.integrations.vllm.loading import Loader
from tiered_kv.integrations.vllm.names import Names
from tiered_kv.integrations.vllm.options import options
from tiered_kv.integrations.vllm.pages import Pages, planes_of
from tiered_kv.integrations.vllm.plans import Load, Step, Store
from tiered_kv.integrations.vllm.requests import spans
from tiered_kv.integrations.vllm.saving import Saver
from tiered_kv.integrations.vllm.scheduling import Scheduling
from tiered_kv.integrations.vllm.tally import Tally
from tiered_kv.layout import KVLayout
from tiered_kv.types import BlockKey, Lease
from tiered_kv.wire import NO_LEASE, Ask, Found, Link

GROUP = 4
PAGE = LAYOUT.block_tokens // GROUP
"""Tokens of an engine's page."""
N_PAGES = 64
BLOCK = GROUP * PAGE
"""Tokens of a block of ours."""


def hashes_of(seed: object, n: int) -> list[bytes]:
    """Chained hashes of `n` pages; a longer list begins with the shorter one."""
    out = [hashlib.sha256(repr(seed).encode()).digest()]
    while len(out) <= n:
        out.append(hashlib.sha256(out[-1]).digest())
    return out[1 : n + 1]


@dataclass
class Request:
    """As much of vLLM's request as the connector reads."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    reason: object = "stop"

    def get_finished_reason(self) -> object:
        return self.reason


def request(name: str, pages: int, rest: int = 1, seed: object = 0, **hints: Any) -> Request:
    """A prompt of so many complete pages and `rest` tokens behind them."""
    n = pages * PAGE + rest
    params = {"tiered_kv": hints} if hints else None
    return Request(name, hashes_of(seed, pages), n, n, kv_transfer_params=params)


@dataclass
class NearLink:
    """What `NodeLink` is to an engine, around an attachment to a node of this process."""

    attachment: Attachment
    up: bool = True
    forgotten: int = 0
    suspected: list[str] = field(default_factory=list)

    @classmethod
    def to(cls, link: Link, timeout_s: float = LONG_S) -> "NearLink":
        return cls(Attachment(link, timeout_s))

    def call(self, verb: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        self._there()
        return self.attachment.call(verb, *args, wait_s=wait_s, **kwargs)

    def introduce(self, layout: KVLayout) -> Mapped:
        self._there()
        return self.attachment.introduce(layout)

    def forget_pool(self, mapped: Mapped | None = None) -> None:
        self.forgotten += 1
        self.attachment.lost(mapped or self.attachment.mapped)

    def give_back(self, reservation: int) -> None:
        self.attachment.give_back(reservation, now=self.up)

    def settle(self) -> None:
        if self.up:
            self.attachment.settle()

    def suspect(self, why: str) -> None:
        self.suspected.append(why)
        self.up = False

    def _there(self) -> None:
        if not self.up:
            raise Unreachable("the test has taken the node away")


class Scripted:
    """A link whose `find` answers what the test says, when it says so. `called` has every verb
    and its arguments."""

    def __init__(self, **found: Any) -> None:
        self.up = True
        self.outages = 0
        self.found: dict[str, Any] = {"blocks": 0, "tail": 0, "load": None, "leased": None} | found
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.called: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.suspected: list[str] = []
        self._leases = 100

    def call(self, verb: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        self.called.append((verb, args, kwargs))
        if verb != "find":
            return None
        assert self.gate.wait(LONG_S)
        if self.error is not None:
            raise self.error
        return self._find(args[0], args[1])

    def introduce(self, layout: KVLayout) -> None:
        assert isinstance(layout, KVLayout)

    def suspect(self, why: str) -> None:
        self.suspected.append(why)
        self.up = False

    def forget_pool(self, mapped: Any = None) -> None:
        assert mapped is None

    def verbs(self, verb: str) -> list[tuple[Any, ...]]:
        return [args for name, args, _ in list(self.called) if name == verb]

    def _find(self, asks: Sequence[Ask], skip: int) -> Found:
        blocks, tail = self.found["blocks"], self.found["tail"]
        there = max(0, blocks - skip) + bool(tail)
        load = there if self.found["load"] is None else self.found["load"]
        leased = load if self.found["leased"] is None else self.found["leased"]
        leases = []
        for ask in asks:
            run = [*ask.run[:blocks], *([ask.tails[blocks][tail - 1]] if tail else [])]
            keys = tuple(run[skip : skip + leased])
            self._leases += 1
            slots = tuple(range(len(keys)))
            handle = self._leases if keys else NO_LEASE
            leases.append(Lease(handle, keys, slots, LAYOUT.block_bytes, 1e9, slots))
        sums = tuple(tuple(0 for _ in lease.keys) for lease in leases)
        return Found(blocks, tail, load, tuple(leases), (), None, sums)


def caches(n_pages: int = N_PAGES, seed: object = None) -> dict[str, torch.Tensor]:
    """An engine's KV tensors, layer by layer; random bytes with a seed, else zeros."""
    width = LAYOUT.payload_bytes // GROUP // LAYOUT.layers
    out = {}
    for i in range(LAYOUT.layers):
        one = torch.zeros(n_pages, width, dtype=torch.uint8)
        if seed is not None:
            data = bytearray(random.Random(f"{seed} {i}").randbytes(n_pages * width))
            one = torch.frombuffer(data, dtype=torch.uint8).reshape(n_pages, width)
        out[f"layers.{i}.attn"] = one
    return out


class Gated(HostCopying):
    """Copies that wait at a gate before their first byte, and call `copied` after the last."""

    def __init__(self, pages: Pages) -> None:
        super().__init__(pages)
        self.gate = threading.Event()
        self.gate.set()
        self.came = threading.Event()
        self.copied: Callable[[], None] = lambda: None

    def into_pages(self, *args: Any) -> None:
        self._pass()
        super().into_pages(*args)
        self.copied()

    def into_slots(self, *args: Any) -> None:
        self._pass()
        super().into_slots(*args)
        self.copied()

    def _pass(self) -> None:
        self.came.set()
        assert self.gate.wait(LONG_S)


class Rig:
    """A rank of an engine: pages on the CPU, a saver and a loader over a node of this process."""

    def __init__(
        self, link: Link, seed: object = None, patience_s: float = LONG_S,
        deadline_s: float = LONG_S, verify: float = 1.0, piece_blocks: int = 64,
    ) -> None:  # fmt: skip
        self.link = NearLink.to(link)
        self.caches = caches(seed=seed)
        self.pages = Pages(planes_of(self.caches, N_PAGES), GROUP)
        self.copying = Gated(self.pages)
        self.tally = Tally()
        self.names = Names([LAYOUT], SECRET, GROUP)
        self.counts: dict[str, int] = {}
        self.stored: dict[str, int] = {}
        owner = f"client-{uuid.uuid4().hex}"
        self.saver = Saver(
            self.link, self.copying, LAYOUT, 0, owner, patience_s, LONG_S, self.tally
        )
        self.loader = Loader(
            self.link, self.pages, self.copying, LAYOUT, 0, deadline_s, LONG_S, verify, self.tally
        )
        self.loader._piece = piece_blocks

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *exception: object) -> None:
        self.copying.gate.set()
        self.loader.close()
        self.saver.close()
        self.link.attachment.close()

    def store(self, name: str, hashes: Sequence[bytes], pages: Sequence[int], **more: Any) -> Store:
        """The save of a request from its first page on."""
        parts = spans(pages, 0, GROUP)
        keys = [self.names.block(hashes, i, len(p.pages))[0] for i, p in enumerate(parts)]
        return Store(name, parts, (tuple(keys),), (None,), **more)

    def save(self, name: str, hashes: Sequence[bytes], pages: Sequence[int], **more: Any) -> Store:
        """A save that is waited for."""
        store = self.store(name, hashes, pages, **more)
        before = self.told().get(name, 0)
        self.saver.submit(store)
        until(lambda: self.told().get(name, 0) > before, f"the end of the save of {name}")
        return store

    def load(self, name: str, store: Store, pages: Sequence[int], **more: Any) -> Load:
        """The load of what was saved, into other pages, all of it fetched."""
        parts = spans(pages, 0, GROUP)
        lease = Lease(NO_LEASE, (), (), LAYOUT.block_bytes, 0.0)
        return Load(name, parts, store.keys, (lease,), ((),), **more)

    def loaded(self, load: Load) -> set[int]:
        """Carry a load out; the pages that failed."""
        self.loader.submit(load)
        until(lambda: load.request in self.loader.arrived(), f"the end of the load {load.request}")
        return self.loader.failed()

    def told(self) -> dict[str, int]:
        """Saves that have ended, by request; adds what was counted to `counts`."""
        told = self.tally.take()
        if told is not None:
            for name, n in told.counts.items():
                self.counts[name] = self.counts.get(name, 0) + n
            for name, n in told.stored.items():
                self.stored[name] = self.stored.get(name, 0) + n
        return self.stored

    def bytes_of(self, pages: Sequence[int]) -> list[bytes]:
        """What a page holds, all layers."""
        return [
            b"".join(bytes(one[page].numpy().data) for one in self.caches.values())
            for page in pages
        ]

    def held(self, keys: Sequence[BlockKey]) -> list[str]:
        """Where the node says that blocks are."""
        return [type(one).__name__ for one in self.link.call("lookup", list(keys))]

    def wipe(self, pages: Sequence[int], value: int = 0) -> None:
        for one in self.caches.values():
            one[list(pages)] = value


def rig(service: Service, **options: Any) -> Rig:
    return Rig(service.to_host, **options)


class Engine:
    """vLLM's scheduler as far as the connector sees it: pages, steps and computed tokens."""

    def __init__(self, link: Scripted, beside: Any = None, ranks: int = 1, **given: Any) -> None:
        layouts = [replace(LAYOUT, tp_rank=rank, tp_size=ranks) for rank in range(ranks)]
        self.link = link
        self.names = Names(layouts, SECRET, GROUP)
        self.s = Scheduling(link, options(given), self.names, PAGE, beside)  # type: ignore[arg-type]
        self.pages: dict[str, list[int]] = {}
        self._free = count(100)

    def matched(self, one: Request, computed: int = 0) -> tuple[int, bool]:
        """Asks until the answer is known."""
        found: list[tuple[int | None, bool]] = []

        def known() -> bool:
            found.append(self.s.matched(one, computed))  # type: ignore[arg-type]
            return found[-1][0] is not None

        until(known, f"an answer for {one.request_id}", LONG_S)
        tokens, later = found[-1]
        assert tokens is not None
        return tokens, later

    def allocate(self, one: Request, external: int, computed: int = 0) -> list[int]:
        n = -(-one.num_tokens // PAGE)
        ids = self.pages.setdefault(one.request_id, [])
        ids += [next(self._free) for _ in range(n - len(ids))]
        self.s.allocated(one, ids, external)  # type: ignore[arg-type]
        one.num_computed_tokens = computed + external
        return ids

    def admit(self, one: Request, computed: int = 0) -> int:
        """Look up, allocate; the tokens that are to be loaded."""
        tokens, _ = self.matched(one, computed)
        self.allocate(one, tokens, computed)
        return tokens

    def step(self, *scheduled: Request, n: int | None = None, preempted: Any = None) -> Step:
        """A step that computes `n` tokens of each (default: the rest of the prompt, at least 1)."""
        tokens = {
            one.request_id: n or max(1, one.num_tokens - one.num_computed_tokens)
            for one in scheduled
        }
        step = self.s.step(tokens, preempted, self.pages.get, 0.0)
        for one in scheduled:
            one.num_computed_tokens += tokens[one.request_id]
        return step

    def finish(self, one: Request) -> bool:
        return self.s.finished(one, self.pages.pop(one.request_id, []))  # type: ignore[arg-type]

    def run(self, one: Request) -> Step:
        """A request that loads nothing, up to the step behind its prompt."""
        self.admit(one)
        self.step(one)
        return self.step(one, n=1)


@contextmanager
def engine(link: Scripted | None = None, **given: Any) -> Iterator[Engine]:
    made = Engine(link or Scripted(), **given)
    try:
        yield made
    finally:
        made.link.gate.set()
        made.s.close()


def released(link: Scripted) -> list[int]:
    return sorted(args[0] for args in link.verbs("release"))
