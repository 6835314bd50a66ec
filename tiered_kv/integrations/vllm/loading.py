"""The worker's loads: from slots of the node into the engine's pages."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tiered_kv.attachment import Mapped
from tiered_kv.checksum import checksum
from tiered_kv.errors import BadLayout, StaleHandle, TieredKVError, Unreachable
from tiered_kv.integrations.vllm.copying import Copying, Slot
from tiered_kv.integrations.vllm.jobs import Job
from tiered_kv.integrations.vllm.link import NodeLink
from tiered_kv.integrations.vllm.pages import Pages
from tiered_kv.integrations.vllm.plans import Load, Span
from tiered_kv.integrations.vllm.releasing import Releaser
from tiered_kv.integrations.vllm.tally import Tally
from tiered_kv.layout import KVLayout
from tiered_kv.supervise import surviving
from tiered_kv.types import BlockKey, Lease
from tiered_kv.wire import NO_LEASE, Fetched, life_of

LOAD_THREADS = 4
"""Loads at once: most of their time they wait for the node."""
IDLE_WAIT_S = 0.005
"""What a new request waits at most behind that."""
PIECE_BYTES = 16 << 20
"""What is fetched from below first, and then twice as much each time: the next piece comes up while
this one is copied, and a long load does not pay a call for each small piece."""
LAYERS_WAIT_S = 0.5
"""A load by layers is of blocks in the pool and needs no call before it copies, but where the node
has restarted or all threads wait for it: the engine waits no longer for one that has not begun."""


class _Transfer(Job):
    """A load under way. `done` blocks, and with `by_layer` also planes, are in the pages."""

    def __init__(self, load: Load, now: float) -> None:
        super().__init__(load.request, now)
        self.load = load
        self.done = 0
        self.planes = 0
        self.step = threading.Condition()

    def failed_pages(self) -> set[int]:
        """Engine pages that did not get their bytes."""
        return {page for span in self.load.spans[self.done :] for page in span.pages}

    def wait_plane(self, plane: int, seconds: float) -> bool:
        """Wait so long at most until this plane is complete, or nothing more comes."""
        with self.step:
            return self.step.wait_for(lambda: self.planes > plane or self.over, seconds)

    def advance(self, planes: int) -> None:
        """So many planes are complete; wakes whoever waits for a layer."""
        with self.step:
            self.planes = planes
            self.step.notify_all()


class Loader:
    """Called by the engine's thread. Whatever fails is pages that are reported as failed."""

    def __init__(
        self, link: NodeLink, pages: Pages, copying: Copying, layout: KVLayout, rank: int,
        deadline_s: float, ttl_s: float, verify: float, tally: Tally,
    ) -> None:  # fmt: skip
        """A load that takes longer than `deadline_s` has failed. `verify` is the share of blocks
        whose checksum is compared."""
        self._link = link
        self._pages = pages
        self._copying = copying
        self._layout = layout
        self._rank = rank
        self._deadline_s = deadline_s
        self._ttl_s = ttl_s
        self._verify = verify
        self._tally = tally
        self._piece = -(-PIECE_BYTES // layout.block_bytes)
        self._open: list[_Transfer] = []
        self._layered: list[_Transfer] = []
        self._failed: set[int] = set()
        self._threads = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kv-load")
        self._releaser = Releaser(self._release)

    def submit(self, load: Load) -> None:
        """Start a load. Does not wait."""
        transfer = _Transfer(load, time.monotonic())
        (self._layered if load.by_layer else self._open).append(transfer)
        self._threads.submit(self._carry, transfer)

    def wait_layer(self, layer: str) -> None:
        """Wait until this layer of every load by layers has come (or has failed)."""
        plane = self._pages.plane_of(layer)
        if plane is None:
            return
        for transfer in self._layered:
            while not transfer.wait_plane(plane, LAYERS_WAIT_S) and not transfer.give_up():
                pass  # it copies: that does not take for ever

    def arrived(self, idle: bool = False) -> set[str]:
        """Requests whose load has ended, well or not. Never waits for the node.

        An engine that computes nothing waits here for a moment (`idle`): if it turned round
        instead, the interpreter's lock would go to and fro between its thread and each small copy
        (measured: 0.35 s for what takes 6 ms alone).
        """
        if idle and self._open:
            self._open[0].wait(IDLE_WAIT_S)
        late = time.monotonic() - self._deadline_s
        for transfer in self._open:
            if not transfer.over and transfer.began_s < late and transfer.give_up():
                self._tally.add("load.late")
        ended = [t for t in self._open if t.over]
        self._open = [t for t in self._open if not t.over]
        for transfer in ended:
            self._failed |= transfer.failed_pages()
        return {t.request for t in ended}

    def failed(self) -> set[int]:
        """Pages that failed since the last call; waits for the loads by layers of this step."""
        for transfer in self._layered:
            while not transfer.wait(LAYERS_WAIT_S) and not transfer.give_up():
                pass
            self._failed |= transfer.failed_pages()
        self._layered = []
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Wait for copies that run; what waits for the node is left to itself."""
        for transfer in [*self._open, *self._layered]:
            transfer.yield_()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._releaser.close()

    # -- in a thread ----------------------------------------------------------------------

    def _carry(self, transfer: _Transfer) -> None:
        with surviving("loading blocks of a request") as failure:
            try:
                self._load(transfer)
            except Unreachable:
                self._tally.add("load.unreachable")
            except TieredKVError as error:
                if isinstance(error, BadLayout):  # of a node that has restarted
                    self._link.forget_pool()
                self._tally.add(f"load.{type(error).__name__}")
        if failure:
            self._tally.add("load.error")
        transfer.end()
        transfer.advance(len(self._pages.planes))
        self._tally.add("load.blocks", transfer.done)
        self._tally.add("load.failed", len(transfer.load.spans) - transfer.done)

    def _load(self, transfer: _Transfer) -> None:
        load, rank = transfer.load, self._rank
        run, lease = load.keys[rank], load.leases[rank]
        mapped = self._mapped(lease)
        if lease.id != NO_LEASE:
            self._take(transfer, mapped, lease, load.checksums[rank])
        n = self._piece
        while transfer.done < len(run) and not transfer.over:
            left = transfer.began_s + self._deadline_s - time.monotonic()
            if left <= 0:
                return
            piece = run[transfer.done : transfer.done + n]
            n *= 2
            fetched: Fetched = self._link.call(
                "fetch", self._layout.fingerprint, piece, self._ttl_s, left, True,
                run[transfer.done - 1] if transfer.done else None, wait_s=left,
            )  # fmt: skip
            self._take(transfer, mapped, fetched.lease, fetched.checksums)
            if len(fetched.lease.keys) < len(piece):
                self._tally.add(f"load.miss.{fetched.why}", len(piece) - len(fetched.lease.keys))
                return

    def _mapped(self, lease: Lease) -> Mapped:
        """The pool that a lease is of: mapped anew when the node has restarted meanwhile."""
        mapped = self._link.introduce(self._layout)
        if lease.keys and life_of(lease.id) != mapped.welcome.life:
            self._link.forget_pool(mapped)
            mapped = self._link.introduce(self._layout)
        return mapped

    def _take(
        self, transfer: _Transfer, mapped: Mapped, lease: Lease, sums: Sequence[int | None]
    ) -> None:
        """Copy what a lease covers and end it. Raises `StaleHandle` when the slots are of
        another pool or were given to others meanwhile: nothing of it counts then."""
        spans = transfer.load.spans[transfer.done : transfer.done + len(lease.keys)]
        wrong: list[BlockKey] = []
        try:
            try:
                mapped.check(lease.id)
            except StaleHandle:
                self._link.forget_pool(mapped)
                raise
            slots = [mapped.tensor[s : s + lease.nbytes] for s in lease.slots]
            began = time.monotonic()
            if not transfer.begin():
                return
            try:
                self._copy(transfer, slots, spans)
            finally:
                transfer.pause()
            took = time.monotonic() - began
            wrong = self._wrong(mapped, lease, slots, sums)
            if not wrong:
                pages = sum(len(span.pages) for span in spans)
                self._tally.copied(pages * self._pages.page_bytes, took)
                transfer.done += len(spans)
            if wrong or transfer.done == len(transfer.load.spans):
                transfer.end()  # before the lease: nobody needs to wait for that call
        finally:
            if wrong:
                self._release(lease.id)
            else:
                self._releaser.later(lease.id)
        if wrong:  # a leased block would go with all its copies, and those below may be intact
            self._tally.add("load.corrupt", len(wrong))
            self._link.call("distrust", wrong)

    def _release(self, lease: int) -> None:
        with suppress(StaleHandle, Unreachable):
            self._link.call("release", lease)

    def _copy(self, transfer: _Transfer, slots: Sequence[Slot], spans: Sequence[Span]) -> None:
        if not transfer.load.by_layer:
            self._copying.into_pages(slots, spans)
            return
        for plane in range(len(self._pages.planes)):
            self._copying.into_pages(slots, spans, [plane])
            transfer.advance(plane + 1)

    def _wrong(
        self, mapped: Mapped, lease: Lease, slots: Sequence[Slot], sums: Sequence[int | None]
    ) -> list[BlockKey]:
        """The blocks whose bytes are not those that were saved. Raises `StaleHandle` when the
        lease ended too early to tell."""
        wrong = [
            key
            for slot, key, wanted in zip(slots, lease.keys, sums, strict=False)
            if wanted is not None
            and random.random() < self._verify
            and checksum(slot.numpy().data) != wanted
        ]
        # first: a slot that was given to another block has other bytes, and its old one no fault
        if not mapped.generations.unchanged(lease.slots, lease.generations):
            self._tally.add("load.lapsed", len(lease.keys))
            raise StaleHandle("the lease ended while its blocks were copied")
        return wrong
