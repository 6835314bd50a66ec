"""What the scheduler's side keeps: which blocks are saved when, and what is said of a session."""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from tiered_kv.integrations.vllm.announcing import Announcing
from tiered_kv.integrations.vllm.asking import Asking
from tiered_kv.integrations.vllm.link import NodeLink
from tiered_kv.integrations.vllm.names import Names
from tiered_kv.integrations.vllm.options import Options
from tiered_kv.integrations.vllm.plans import Said, Store
from tiered_kv.integrations.vllm.requests import Tracked, spans
from tiered_kv.sessions import Session
from tiered_kv.types import BlockKey, SessionId

LONGEST_NAME = 112
"""Characters of a session's name that leave room for a rank behind it."""


class Worker(Protocol):
    """The worker's side, where it is in this process."""

    def store(self, store: Store) -> None:
        """Start a save now: no step may follow."""
        ...


class PagesOf(Protocol):
    """The engine's pages of a request, in order; None when it has none."""

    def __call__(self, request_id: str, /) -> Sequence[int] | None: ...


class Keeping:
    """Called by the engine's thread; waits for nothing.

    A worker reads pages of a request until each of its saves has ended on each rank. The engine
    may give these pages away only after the worker has let them go: by preemption, which drains
    them, or at the request's end, which is held up. Without that:

    1. A prompt is computed; its save waits for slots.
    2. Its only token comes, the request ends, its pages go to another request and are overwritten.
    3. The save gets its slots and copies the other request's bytes under the first one's names.
    """

    def __init__(
        self, link: NodeLink, options: Options, names: Names, page: int, beside: Worker | None,
        asking: Asking, announcing: Announcing | None = None,
    ) -> None:  # fmt: skip
        """See `Scheduling`."""
        self._announcing = announcing
        self._link = link
        self._options = options
        self._names = names
        self._page = page
        self._group = names.group
        self._beside = beside
        self._asking = asking
        self._stores: list[Store] = []
        self._open: Counter[str] = Counter()  # saves of a request, a rank each, that have not ended
        self._keys: dict[str, set[BlockKey]] = {}  # of rank 0, of these saves
        self._saving: dict[BlockKey, str] = {}

    def is_saving(self, key: BlockKey | None = None) -> bool:
        """Whether a block (its name on rank 0), or any at all, is on its way to the node."""
        return bool(self._saving) if key is None else key in self._saving

    def computed(self, one: Tracked, pages_of: PagesOf) -> None:
        """Save the complete blocks that were computed before this step and are not kept yet."""
        request = one.request
        if not one.hints.store or not self._link.up or one.loading or one.question is not None:
            return  # with a question open, all that is held would be offered anew
        blocks = self._done(one) // self._group
        if blocks <= one.kept:
            return
        ids = pages_of(request.request_id)
        if ids is None or len(ids) < blocks * self._group:
            return
        self._stores.append(self._store(one, ids, blocks * self._group, (), False))
        one.kept = blocks

    def take(self) -> tuple[Store, ...]:
        """The saves to start in this step."""
        stores, self._stores = tuple(self._stores), []
        return stores

    def finished(self, one: Tracked, pages: Sequence[int]) -> bool:
        """A request has ended: save what is left of it, and tell of its session. Whether its
        pages are still needed."""
        request_id = one.request.request_id
        store = self._last(one, pages)
        if store is None:
            self._tell(one)
            if not self._open[request_id]:
                del self._open[request_id]
                return False
            ranks = len(self._names.layouts)
            store = Store(request_id, (), ((),) * ranks, (None,) * ranks, last=True)
            self._open[request_id] += ranks
        if self._beside is not None:
            self._beside.store(store)
        else:
            self._stores.append(store)
        return True

    def preempted(self, request_id: str) -> None:
        """Its pages are gone: saves that were not sent are dropped, the worker ends the others."""
        kept = [store for store in self._stores if store.request != request_id]
        self._ended(request_id, (len(self._stores) - len(kept)) * len(self._names.layouts))
        self._stores = kept
        self._forget(request_id)

    def stored(self, ended: Mapping[str, int]) -> None:
        """So many saves of these requests have ended, each rank counting its own."""
        for request_id, n in ended.items():
            self._ended(request_id, n)

    def _ended(self, request_id: str, n: int) -> None:
        self._open[request_id] -= n
        if self._open[request_id] <= 0:
            del self._open[request_id]
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        for key in self._keys.pop(request_id, ()):
            if self._saving.get(key) == request_id:
                del self._saving[key]

    # -- making saves ---------------------------------------------------------------------

    def _done(self, one: Tracked) -> int:
        """Complete pages that hold what they should, as far as they are to be kept."""
        request = one.request
        tokens = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        if tokens <= one.unsure:
            return 0
        if not self._options.save_generated:
            tokens = min(tokens, request.num_prompt_tokens)
        return min(len(one.hashes), int(tokens) // self._page)

    def _last(self, one: Tracked, pages: Sequence[int]) -> Store | None:
        """The save at a request's end, with its incomplete last block and its session."""
        if not one.hints.store or one.hints.ended or not self._link.up:
            return None
        done = min(self._done(one), len(pages))
        if done == 0 or (done <= one.kept * self._group and one.hints.session is None):
            return None
        return self._store(one, pages, done, self._sessions(one, done), True)

    def _store(
        self, one: Tracked, ids: Sequence[int], done: int, sessions: tuple[Session, ...],
        last: bool,
    ) -> Store:  # fmt: skip
        """A save of the pages from the first block that is not kept to page `done`."""
        group, names, hashes = self._group, self._names, one.hashes
        request_id, ranks = one.request.request_id, range(len(names.layouts))
        first = min(one.kept, done // group)
        parts = spans(ids[first * group : done], first * group, group)
        named = [names.block(hashes, first + i, len(part.pages)) for i, part in enumerate(parts)]
        before = names.block(hashes, first - 1) if first else [None] * len(ranks)
        keys = tuple(tuple(name[rank] for name in named) for rank in ranks)
        self._open[request_id] += len(ranks)
        self._keys.setdefault(request_id, set()).update(keys[0])
        self._saving.update(dict.fromkeys(keys[0], request_id))
        said = said_of(one) if sessions else None
        if self._announcing is not None:
            self._announcing.note(one.request, keys[0], first, done)
        return Store(request_id, parts, keys, tuple(before), sessions, last, said)

    def _sessions(self, one: Tracked, done: int) -> tuple[Session, ...]:
        if one.hints.session is None:
            return ()
        group, hashes = self._group, one.hashes
        whole, rest = divmod(done, group)
        named = [self._names.block(hashes, i) for i in range(whole)]
        if rest:
            named.append(self._names.block(hashes, whole, rest))
        return tuple(
            Session(
                session_of(one.hints.session, rank), layout.fingerprint,
                tuple(name[rank] for name in named), done * self._page, bool(rest), 0.0,
            )
            for rank, layout in enumerate(self._names.layouts)
        )  # fmt: skip

    def _tell(self, one: Tracked) -> None:
        """Pass on what is known of its session where no save does."""
        if one.hints.session is None or not self._link.up:
            return
        said = said_of(one).verb()
        for rank in range(len(self._names.layouts)):
            self._asking.hint("hint", session_of(one.hints.session, rank), **said)


def said_of(one: Tracked) -> Said:
    """What is known of the future of a request's session now."""
    reason = one.request.get_finished_reason()
    return Said(
        one.hints.ended, str(reason) if reason is not None else "other", one.hints.pause_s,
        one.hints.priority,
    )  # fmt: skip


def session_of(session: SessionId, rank: int) -> SessionId:
    """A session's name on a rank: each has a run of its own."""
    if rank == 0:
        return session
    name: str = session
    if len(name) > LONGEST_NAME:
        name = blake2b(name.encode(), digest_size=16).hexdigest()
    return SessionId(f"{name}@tp{rank}")
