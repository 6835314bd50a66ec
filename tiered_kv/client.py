"""What users call: save a session's KV, wake it again.

    with tiered_kv.connect() as kv:
        kv.save("chat-1", layout, tokens, fill)
        woken = kv.wake("chat-1", layout, copy)

Bytes never travel through a call: `fill` writes into slots of a mapped pool, `copy` reads from
them. A service that is broken, slow or full shows as a miss (`why` says which); only bad input and
unknown sessions raise.
"""

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_kv import keys, liveness
from tiered_kv.attachment import Attachment, Mapped
from tiered_kv.checksum import checksum
from tiered_kv.config import Config
from tiered_kv.errors import BadLayout, StaleHandle, Unreachable
from tiered_kv.inputs import check_seconds
from tiered_kv.layout import KVLayout
from tiered_kv.policies.load_or_recompute import Prefill
from tiered_kv.sessions import Session, session_id
from tiered_kv.types import Medium, Refused, Reservation, SessionId, Why
from tiered_kv.wire import Committed, Fetched, Link

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Fill(Protocol):
    """Writes block `index` with its `tokens` tokens into `slot`, all `block_bytes` of it."""

    def __call__(self, index: int, tokens: int, slot: "torch.Tensor", /) -> None: ...


Copy = Callable[[list["torch.Tensor"], int], T]
"""Copies the first `n` tokens out of block tensors (flat uint8, `block_bytes` each)."""


class Directory(Protocol):
    """Who serves a session; see `connecting.Cluster`."""

    config: Config

    def link_for(self, session: str) -> Link:
        """The link to the node that serves this session from this host."""
        ...

    def nodes(self) -> list[dict[str, Any]]:
        """The status of every node that answers."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a save: `blocks` were copied, `held` needed no copy, `durable` of the whole
    run are on NVMe. With `why` the session was not saved, and will be a miss."""

    blocks: int
    held: int
    durable: int = 0
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class Woken(Generic[T]):
    """What a wake brought: `value` is what `copy` returned for the first `n_tokens` of `tokens`.

    `found[i]` is the tier in which block i was asleep. `why` tells why `missed`
    blocks have to be computed again. `value` is None exactly when `n_tokens` is 0.
    """

    tokens: npt.NDArray[np.uint32]
    n_tokens: int
    value: T | None
    found: tuple[Medium, ...]
    missed: int
    why: Why | None


class Client:
    """A connection to the service. Thread-safe; one is enough for a process."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.config = directory.config
        self._secret = directory.config.service.tenant_secret.encode()
        self._name = f"client-{uuid.uuid4().hex}"
        self._alive: dict[str, liveness.Alive] = {}
        self._attached: dict[Link, Attachment] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def save(
        self, session: str, layout: KVLayout, tokens: keys.Tokens, fill: Fill,
        *, durable: bool = False,
    ) -> Saved:  # fmt: skip
        """Store the KV of `tokens` as this session; only blocks that nobody holds are filled.

        Two calls, whatever the length. `durable` waits until all is on NVMe. Raises `BadSession`,
        `BadInput`, `BadLayout`, and what `fill` raises: nothing is visible then.
        """
        sid = session_id(session)
        run = keys.chain(layout, self._secret, tokens)
        packed = keys.pack_tokens(tokens)
        record = Session(
            sid, layout.fingerprint, tuple(run.keys), len(packed) // 4, bool(run.tail), 0.0, packed
        )
        try:
            node, mapped, answer = self._served(sid, layout, partial(self._reserve, record))
        except Unreachable:
            return Saved(0, 0, why=Why.UNREACHABLE)
        if isinstance(answer, Refused):
            return Saved(0, 0, why=answer.why)
        return self._store(node, mapped, answer, record, layout, fill, durable)

    def _reserve(self, session: Session, node: Attachment, mapped: Mapped) -> Reservation | Refused:
        answer: Reservation | Refused = node.call(
            "reserve", session.layout, session.run, self._name,
            wait_s=self.config.service.store_deadline_s,
        )  # fmt: skip
        node.settle()
        if isinstance(answer, Reservation):
            try:
                mapped.check(answer.id)
            except StaleHandle:
                node.give_back(answer.id, now=True)
                raise
        return answer

    def _store(
        self, node: Attachment, mapped: Mapped, reserved: Reservation, session: Session,
        layout: KVLayout, fill: Fill, durable: bool,
    ) -> Saved:  # fmt: skip
        """Fill and commit. Whatever is raised, nothing stays reserved."""
        try:
            checksums = self._fill(mapped, reserved, session, layout, fill)
        except BaseException:
            node.give_back(reserved.id, now=True)
            raise
        wait_s = 2 * self.config.service.store_deadline_s if durable else 0.0  # here and below
        try:
            done: Committed = node.call(
                "commit", reserved.id, checksums, session=session, durable=durable, wait_s=wait_s
            )
        except (StaleHandle, Unreachable):
            node.give_back(reserved.id, now=False)
            node.lost(mapped)
            return Saved(0, 0, why=Why.UNREACHABLE)
        except BaseException:
            node.give_back(reserved.id, now=True)
            raise
        return Saved(done.blocks, reserved.held, done.durable)

    def _fill(
        self, mapped: Mapped, reserved: Reservation, session: Session, layout: KVLayout,
        fill: Fill,
    ) -> list[int] | None:  # fmt: skip
        """Let the caller fill each slot; checksums where the pool is host memory (HBM is sealed
        when its blocks first arrive in DRAM)."""
        pool, n, step = mapped.tensor, reserved.nbytes, layout.block_tokens
        at = {key: i for i, key in enumerate(session.run)}
        host = mapped.welcome.medium is Medium.DRAM
        checksums: list[int] = []
        for key, slot in zip(reserved.keys, reserved.slots, strict=True):
            index = at[key]
            block = pool[slot : slot + n]
            fill(index, min(step, session.n_tokens - index * step), block)
            if host:
                checksums.append(checksum(block.numpy().data))
        _complete(pool)
        return checksums if host else None

    def wake(
        self, session: str, layout: KVLayout, copy: Copy[T], *, deadline_s: float | None = None,
        prefill: Prefill | None = None,
    ) -> Woken[T]:  # fmt: skip
        """Bring a session's leading blocks up and copy them out.

        Two calls, whatever the length; waits for slower tiers up to `deadline_s` (default
        `wake_deadline_s`) and gives what has come by then. With `prefill`, the measured rate of
        the engine, only blocks come that are loaded faster than they are computed. Bytes whose
        lease lapsed during the copy are thrown away. Raises `BadSession`, `UnknownSession`,
        `BadLayout`.
        """
        sid = session_id(session)
        wait_s = self.config.service.wake_deadline_s if deadline_s is None else deadline_s
        check_seconds("deadline_s", wait_s, zero=True)
        ask = partial(self._wake, sid, layout, wait_s, prefill)
        try:
            node, mapped, fetched = self._served(sid, layout, ask)
        except Unreachable:
            return Woken(np.empty(0, np.uint32), 0, None, (), 0, Why.UNREACHABLE)
        return self._take(node, mapped, fetched, layout, copy)

    def _wake(
        self, sid: SessionId, layout: KVLayout, wait_s: float, prefill: Prefill | None,
        node: Attachment, mapped: Mapped,
    ) -> Fetched:  # fmt: skip
        fetched: Fetched = node.call(
            "wake", sid, layout.fingerprint, None, wait_s, prefill, wait_s=wait_s
        )
        node.settle()
        try:
            mapped.check(fetched.lease.id)
        except StaleHandle:
            self._release(node, mapped, fetched.lease.id, 0)
            raise
        return fetched

    def _take(
        self, node: Attachment, mapped: Mapped, fetched: Fetched, layout: KVLayout, copy: Copy[T]
    ) -> Woken[T]:
        lease, session = fetched.lease, fetched.session
        assert session is not None
        tokens = np.frombuffer(session.tokens, "<u4")
        n_tokens = min(len(lease.keys) * layout.block_tokens, session.n_tokens)
        value: T | None = None
        intact = True
        try:
            if n_tokens:
                pool = mapped.tensor
                value = copy([pool[s : s + lease.nbytes] for s in lease.slots], n_tokens)
                _complete(pool)
                intact = mapped.generations.unchanged(lease.slots, lease.generations)
        finally:
            self._release(node, mapped, lease.id, 0 if intact else len(lease.keys))
        if not intact:
            return Woken(tokens, 0, None, (), len(session.run), Why.LAPSED)
        return Woken(tokens, n_tokens, value, fetched.found, fetched.missed, fetched.why)

    def prefetch(self, session: str) -> int:
        """A request of the session is on its way: start bringing it up and do not wait; how many
        batches are on their way.

        Raises `UnknownSession`, and `Unreachable` like the verbs below."""
        return int(self._call(session, "prefetch"))

    def hint(
        self, session: str, *, ended: bool = False, stopped: str | None = None,
        pause_s: float | None = None, priority: int | None = None,
    ) -> None:  # fmt: skip
        """What is known of a session beyond its requests: why its last one ended, when the next
        one comes, that none does, or how much it matters. See `Node.hint`.

        Raises `UnknownSession` and `BadInput`; `Unreachable` like the verbs below. One call."""
        self._call(session, "hint", ended, stopped, pause_s, priority)

    def fork(self, session: str, new: str) -> None:
        """A second session that shares all blocks of the first. Raises `UnknownSession`."""
        self._call(session, "fork", session_id(new))

    def forget(self, session: str) -> int:
        """Close a session and drop the blocks that only it had; how many blocks."""
        return int(self._call(session, "close_session"))

    def nodes(self) -> list[dict[str, Any]]:
        """The status of every node that answers (`status.node`)."""
        return self.directory.nodes()

    def close(self) -> None:
        """Let go of everything; an embedded cluster ends with its client. Idempotent."""
        with self._lock:
            nodes, self._attached = list(self._attached.values()), {}
            alive, self._alive = list(self._alive.values()), {}
        for node in nodes:
            node.close()
        for proof in alive:
            proof.close()
        self.directory.close()

    def _call(self, session: str, verb: str, *args: Any) -> Any:
        sid = session_id(session)
        return self._node(sid).call(verb, sid, *args)

    def _node(self, sid: SessionId) -> Attachment:
        link = self.directory.link_for(sid)
        with self._lock:
            node = self._attached.get(link)
            if node is None:
                node = Attachment(link, self.config.service.call_timeout_s)
                self._attached[link] = node
        return node

    def _served(
        self, sid: SessionId, layout: KVLayout, ask: Callable[[Attachment, Mapped], T]
    ) -> tuple[Attachment, Mapped, T]:
        """The answer of the session's node, and its pool. Asked twice when the node turns out to
        have restarted since its pool was mapped: the first answer is of no use then. Raises
        `Unreachable`, and what `ask` raises."""
        node = self._node(sid)
        mapped = self._attach(node, layout)
        try:
            return node, mapped, ask(node, mapped)
        except (StaleHandle, BadLayout) as error:  # a new life knows neither handles nor layouts
            node.lost(mapped)
            again = self._attach(node, layout)
            if isinstance(error, BadLayout) and again.welcome.life == mapped.welcome.life:
                raise
        except Unreachable:
            node.lost(mapped)
            raise
        try:
            return node, again, ask(node, again)
        except (StaleHandle, Unreachable) as error:
            node.lost(again)
            raise Unreachable(f"the node keeps restarting: {error}") from error

    def _attach(self, node: Attachment, layout: KVLayout) -> Mapped:
        """The node's pool mapped; proves there that this process lives."""
        mapped = node.introduce(layout)
        folder = mapped.welcome.shm_folder
        with self._lock:
            if folder not in self._alive:
                self._alive[folder] = liveness.hold(Path(folder), self._name)
        return mapped

    def _release(self, node: Attachment, mapped: Mapped, lease: int, lapsed: int) -> None:
        """End a lease; a node that is gone has ended it already."""
        try:
            node.call("release", lease)
            if lapsed:
                node.call("lapsed", lapsed)
        except (StaleHandle, Unreachable):
            node.lost(mapped)


def _complete(pool: "torch.Tensor") -> None:
    """Wait for copies that were only started: generations tell of bytes that are there."""
    if pool.is_cuda:
        import torch

        torch.cuda.synchronize(pool.device)


def connect(
    config: Config | None = None, *, address: str | None = None, embedded: bool | None = None
) -> Client:
    """Join the running service, or start an embedded one that ends with the client.

    `address` is Ray's ("auto", "host:port"); see `connecting.connect`. Raises `Unreachable` and
    what the start of the service raises (`DoesNotFit`, `FolderInUse`, ...). Blocks for seconds.
    """
    from tiered_kv import connecting

    return Client(connecting.connect(config, address=address, embedded=embedded))
