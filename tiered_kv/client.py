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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_kv import keys, liveness
from tiered_kv.attachment import Attachment
from tiered_kv.checksum import checksum
from tiered_kv.config import Config
from tiered_kv.errors import StaleHandle, Unreachable
from tiered_kv.layout import KVLayout
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
            node = self._attach(sid, layout)
        except Unreachable:
            return Saved(0, 0, why=Why.UNREACHABLE)
        try:
            return self._save(node, record, layout, fill, durable)
        except (StaleHandle, Unreachable) as error:
            node.lost(error)
            return Saved(0, 0, why=Why.UNREACHABLE)

    def _save(
        self, node: Attachment, session: Session, layout: KVLayout, fill: Fill, durable: bool
    ) -> Saved:
        answer = node.call("reserve", layout.fingerprint, session.run, self._name)
        if isinstance(answer, Refused):
            return Saved(0, 0, why=answer.why)
        assert isinstance(answer, Reservation)
        try:
            checksums = self._fill(node, answer, session, layout, fill)
        except BaseException:
            node.call("abort", answer.id)
            raise
        done: Committed = node.call(
            "commit", answer.id, checksums, session=session, durable=durable
        )
        return Saved(done.blocks, answer.held, done.durable)

    def _fill(
        self, node: Attachment, reserved: Reservation, session: Session, layout: KVLayout,
        fill: Fill,
    ) -> list[int] | None:  # fmt: skip
        """Let the caller fill each slot; checksums where the pool is host memory (HBM is sealed
        when its blocks first arrive in DRAM)."""
        pool, n, step = node.pool.tensor, reserved.nbytes, layout.block_tokens
        at = {key: i for i, key in enumerate(session.run)}
        checksums: list[int] = []
        for key, slot in zip(reserved.keys, reserved.slots, strict=True):
            index = at[key]
            block = pool[slot : slot + n]
            fill(index, min(step, session.n_tokens - index * step), block)
            if node.medium is Medium.DRAM:
                checksums.append(checksum(block.numpy().data))
        return checksums if node.medium is Medium.DRAM else None

    def wake(
        self, session: str, layout: KVLayout, copy: Copy[T], *, deadline_s: float | None = None
    ) -> Woken[T]:
        """Bring a session's leading blocks up and copy them out.

        Two calls, whatever the length; waits for slower tiers up to `deadline_s` (default
        `wake_deadline_s`) and gives what has come by then. Bytes whose lease lapsed during the
        copy are thrown away. Raises `BadSession`, `UnknownSession`, `BadLayout`.
        """
        sid = session_id(session)
        node = self._node(sid)
        try:
            self._attach(sid, layout)
            fetched: Fetched = node.call("wake", sid, layout.fingerprint, None, deadline_s)
        except (StaleHandle, Unreachable) as error:
            node.lost(error)
            return Woken(np.empty(0, np.uint32), 0, None, (), 0, Why.UNREACHABLE)
        return self._take(node, fetched, layout, copy)

    def _take(
        self, node: Attachment, fetched: Fetched, layout: KVLayout, copy: Copy[T]
    ) -> Woken[T]:
        lease, session = fetched.lease, fetched.session
        assert session is not None
        tokens = np.frombuffer(session.tokens, "<u4")
        n_tokens = min(len(lease.keys) * layout.block_tokens, session.n_tokens)
        value: T | None = None
        intact = True
        try:
            if n_tokens:
                pool = node.pool.tensor
                value = copy([pool[s : s + lease.nbytes] for s in lease.slots], n_tokens)
                intact = node.pool.generations.unchanged(lease.slots, lease.generations)
        finally:
            self._release(node, lease.id, 0 if intact else len(lease.keys))
        if not intact:
            return Woken(tokens, 0, None, (), len(session.run), Why.LAPSED)
        return Woken(tokens, n_tokens, value, fetched.found, fetched.missed, fetched.why)

    def prefetch(self, session: str) -> int:
        """Start bringing a session up and do not wait; how many batches are on their way.

        Raises `UnknownSession`, and `Unreachable` like the verbs below."""
        return int(self._call(session, "prefetch"))

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
        for node in self._attached.values():
            node.close()
        for alive in self._alive.values():
            alive.close()
        self._attached.clear()
        self._alive.clear()
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

    def _attach(self, sid: SessionId, layout: KVLayout) -> Attachment:
        """The session's node with its pool mapped; proves there that this process lives."""
        node = self._node(sid)
        node.introduce(layout)
        folder = node.shm_folder
        with self._lock:
            if folder not in self._alive:
                self._alive[folder] = liveness.hold(Path(folder), self._name)
        return node

    def _release(self, node: Attachment, lease: int, lapsed: int) -> None:
        """End a lease; a node that is gone has ended it already."""
        try:
            node.call("release", lease)
            if lapsed:
                node.call("lapsed", lapsed)
        except (StaleHandle, Unreachable) as error:
            node.lost(error)


def connect(
    config: Config | None = None, *, address: str | None = None, embedded: bool | None = None
) -> Client:
    """Join the running service, or start an embedded one that ends with the client.

    `address` is Ray's ("auto", "host:port"); see `connecting.connect`. Raises `Unreachable` and
    what the start of the service raises (`DoesNotFit`, `FolderInUse`, ...). Blocks for seconds.
    """
    from tiered_kv import connecting

    return Client(connecting.connect(config, address=address, embedded=embedded))
