"""Chunks between vLLM's primary memory and the pool of our node. Blocks: for background threads.

Nothing here raises for a node that is absent, slow, full or restarting: that is a miss, or a chunk
that was not stored.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from tiered_kv import keys, liveness
from tiered_kv.attachment import Mapped
from tiered_kv.config import Service
from tiered_kv.errors import BadLayout, StaleHandle, Unreachable
from tiered_kv.integrations.vllm.secondary_answers import Promise
from tiered_kv.integrations.vllm.secondary_layout import Placed
from tiered_kv.layout import KVLayout
from tiered_kv.tiers.copies import HostCopier, Piece
from tiered_kv.types import BlockKey, Held, Lease, Reservation
from tiered_kv.wire import Committed, Fetched

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

STORE_BYTES = 64 << 20
"""Of one reservation: small beside any pool, and large enough for its two calls not to matter."""
MAX_KNOWN = 1 << 16
"""Blocks that this process has seen in the node's hands. The oldest are forgotten: they become
the beginning of what is stored behind them, which costs it nothing but its place in a run."""


class Way(Protocol):
    """How a process talks to the node of its host; see `link.NodeLink`."""

    def wait(self, seconds: float) -> bool: ...
    def call(self, verb: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any: ...
    def introduce(self, layout: KVLayout) -> Mapped: ...
    def forget_pool(self, mapped: Mapped | None) -> None: ...
    def give_back(self, reservation: int) -> None: ...
    def settle(self) -> None: ...


class Loan(NamedTuple):
    """A lease of the node, and where each chunk is in it."""

    mapped: Mapped
    lease: Lease
    checksums: tuple[int | None, ...]
    where: dict[bytes, int]


class Shelf:
    """The node as a place for chunks. `find`, `load` and `release` may be called by several
    threads at once, `store` by one at a time."""

    def __init__(
        self, way: Way, layout: KVLayout, service: Service, memory: "torch.Tensor", wait_s: float
    ) -> None:
        """`memory` is the primary tier, flat uint8. A lookup waits up to `wait_s` for slower
        tiers, and the first one for the node itself."""
        self._way = way
        self._layout = layout
        self._service = service
        self._secret = service.tenant_secret.encode()
        self._memory = memory
        self._wait_s = wait_s
        self._owner = f"vllm-{uuid.uuid4().hex}"
        self._alive: dict[str, liveness.Alive] = {}
        self._known: OrderedDict[BlockKey, None] = OrderedDict()
        self._joining = True

    def find(self, chunks: Sequence[bytes], holes: bool) -> Promise[bytes, Loan] | None:
        """Bring the leading chunks up, and lease them; with `holes` all that are held.

        One call to the node, two with `holes`. None where nothing is held.
        """
        if self._joining:  # an engine that has just started is worth waiting for, once
            self._way.wait(self._wait_s)
            self._joining = False
        run = keys.from_engine(self._layout, self._secret, chunks)
        named = dict(zip(run, chunks, strict=True))
        began = time.monotonic()
        answer = self._served(lambda mapped: self._fetch(mapped, run, holes))
        if answer is None:
            return None
        mapped, fetched = answer
        lease = fetched.lease
        self._know(lease.keys)
        held = [named[key] for key in lease.keys]
        loan = Loan(mapped, lease, fetched.checksums, {key: i for i, key in enumerate(held)})
        if not held:
            self.release(loan)
            return None
        return Promise(loan, held, began + self._service.lease_ttl_s)

    def load(self, loan: Loan, chunks: Sequence[Placed]) -> set[bytes]:
        """Copy leased chunks into primary memory; the keys of those whose bytes are right.

        Every copy is compared with its checksum, and with the generation of its slot afterwards.
        """
        mapped, lease = loan.mapped, loan.lease
        at = [loan.where[chunk.key] for chunk in chunks]
        slots = [lease.slots[i] for i in at]
        copier = HostCopier(mapped.tensor, self._memory)
        sums = copier.copy_hashed(
            [Piece(slot, chunk.at, lease.nbytes) for slot, chunk in zip(slots, chunks, strict=True)]
        )
        now = mapped.generations.read(slots)
        good: set[bytes] = set()
        wrong: list[BlockKey] = []
        for i, found, generation, chunk in zip(at, sums, now, chunks, strict=True):
            if generation != lease.generations[i]:
                continue
            if loan.checksums[i] in (None, found):
                good.add(chunk.key)
            else:
                wrong.append(lease.keys[i])
        self._tell(len(chunks) - len(good) - len(wrong), wrong)
        return good

    def release(self, loan: Loan) -> None:
        """End a lease; a node that is gone has ended it already."""
        try:
            self._way.call("release", loan.lease.id)
        except (StaleHandle, Unreachable):
            self._way.forget_pool(loan.mapped)

    def store(self, chunks: Sequence[Placed], parents: Sequence[bytes | None]) -> int:
        """Copy chunks out of primary memory unless the node has them; how many it has now.

        `parents` are the chunks before each; those that the node is not known to hold are not
        named to it. Two calls for `STORE_BYTES` of chunks.
        """
        own = self._named([chunk.key for chunk in chunks])
        above = [None if parent is None else self._named([parent])[0] for parent in parents]
        step = max(1, STORE_BYTES // self._layout.block_bytes)
        return sum(
            self._store(own[i : i + step], above[i : i + step], chunks[i : i + step])
            for i in range(0, len(chunks), step)
        )

    def close(self) -> None:
        """Let go of the memory, and of the proof that this process lives. Idempotent."""
        del self._memory
        alive, self._alive = self._alive, {}
        for proof in alive.values():
            proof.close()

    # -- inside ---------------------------------------------------------------------------

    def _named(self, chunks: Sequence[bytes]) -> list[BlockKey]:
        return keys.from_engine(self._layout, self._secret, chunks)

    def _fetch(self, mapped: Mapped, run: Sequence[BlockKey], holes: bool) -> Fetched:
        if holes:
            answers = self._way.call("lookup", run)
            run = [k for k, answer in zip(run, answers, strict=True) if isinstance(answer, Held)]
        fetched: Fetched = self._way.call(
            "fetch", self._layout.fingerprint, run, self._service.lease_ttl_s, self._wait_s,
            wait_s=self._wait_s,
        )  # fmt: skip
        self._way.settle()
        try:
            mapped.check(fetched.lease.id)
        except StaleHandle:
            self._way.call("release", fetched.lease.id)
            raise
        return fetched

    def _store(
        self, own: Sequence[BlockKey], above: Sequence[BlockKey | None], chunks: Sequence[Placed]
    ) -> int:
        parents = [key if key in self._known or key in own else None for key in above]
        answer = self._served(lambda mapped: self._reserve(mapped, own, parents))
        if answer is None or answer[1] is None:
            return 0
        mapped, reserved = answer[0], answer[1]
        at = dict(zip(own, (chunk.at for chunk in chunks), strict=True))
        try:
            copier = HostCopier(self._memory, mapped.tensor)
            sums = copier.copy_hashed(
                [
                    Piece(at[key], slot, reserved.nbytes)
                    for key, slot in zip(reserved.keys, reserved.slots, strict=True)
                ]
            )
            done: Committed = self._way.call("commit", reserved.id, sums)
        except (StaleHandle, Unreachable):
            self._way.give_back(reserved.id)
            self._way.forget_pool(mapped)
            return 0
        except BaseException:
            self._way.give_back(reserved.id)
            raise
        if done.blocks == len(reserved.keys):
            self._know(own)
        else:  # a parent has left: what follows will be the beginning of a run
            for parent in set(parents) - set(own):
                self._known.pop(parent, None) if parent is not None else None
        return reserved.held + done.blocks

    def _reserve(
        self, mapped: Mapped, run: Sequence[BlockKey], parents: Sequence[BlockKey | None]
    ) -> Reservation | None:
        answer = self._way.call(
            "reserve", self._layout.fingerprint, run, self._owner, parents,
            wait_s=self._service.store_deadline_s,
        )  # fmt: skip
        self._way.settle()
        if not isinstance(answer, Reservation):
            return None
        try:
            mapped.check(answer.id)
        except StaleHandle:
            self._way.give_back(answer.id)
            raise
        return answer

    def _served(self, ask: Callable[[Mapped], T]) -> tuple[Mapped, T] | None:
        """The node's pool and its answer; None where there is none. Asked twice when the node
        turns out to have restarted since its pool was mapped."""
        for _ in range(2):
            mapped: Mapped | None = None
            try:
                mapped = self._way.introduce(self._layout)
                self._live(mapped.welcome.shm_folder)
                return mapped, ask(mapped)
            except (StaleHandle, BadLayout):  # a new life knows neither handles nor layouts
                self._way.forget_pool(mapped)
            except Unreachable:
                self._way.forget_pool(mapped)
                return None
        return None

    def _live(self, folder: str) -> None:
        if folder not in self._alive:
            self._alive[folder] = liveness.hold(Path(folder), self._owner)

    def _know(self, blocks: Sequence[BlockKey]) -> None:
        self._known.update(dict.fromkeys(blocks))
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _tell(self, lapsed: int, wrong: list[BlockKey]) -> None:
        """The node counts what was thrown away, and hands out no wrong copy again."""
        try:
            if lapsed:
                self._way.call("lapsed", lapsed)
            if wrong:
                self._way.call("distrust", wrong)
        except Unreachable:
            pass  # a node that is gone hands out nothing
