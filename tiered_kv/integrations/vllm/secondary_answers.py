"""What requests asked the secondary tier for, and what they were promised. Pure.

vLLM asks key by key and again in every step, so answers are remembered for as long as a request
that heard them lives. A hit is a promise: a lease of the node holds the block until it has been
loaded, all requests that asked have finished, or the lease ends. A key whose load failed is a
miss for those requests, or they would ask, load and fail for ever. So is an answer that does not
come.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
P = TypeVar("P")


class Verdict(Enum):
    """What is known of a key."""

    WAIT = auto()
    HIT = auto()
    MISS = auto()


@dataclass(eq=False, slots=True)
class Promise(Generic[K, P]):
    """A lease on some keys that ends at `until_s` by itself; `owed` of them are still to be
    loaded. `lease` is whatever the caller needs to load and to release."""

    lease: P
    keys: Sequence[K]
    until_s: float
    owed: set[K] = field(init=False)

    def __post_init__(self) -> None:
        self.owed = set(self.keys)


@dataclass(slots=True)
class _Entry(Generic[K, P]):
    asked_s: float
    verdict: Verdict = Verdict.WAIT
    promise: Promise[K, P] | None = None
    requests: set[str] = field(default_factory=set)

    def holds(self, now: float) -> bool:
        return self.promise is not None and now < self.promise.until_s


class Answers(Generic[K, P]):
    """Owned by one thread. `now` is seconds of any one monotonic clock."""

    def __init__(self, patience_s: float) -> None:
        """What was not answered in `patience_s` is a miss."""
        self._patience_s = patience_s
        self._entries: dict[K, _Entry[K, P]] = {}
        self._asked: dict[str, set[K]] = {}
        self._batch: dict[str, list[K]] = {}
        self._over: list[Promise[K, P]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def ask(self, key: K, request: str, now: float) -> Verdict:
        """What is known of a key; one that is not known will be in `take`."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(now)
            self._batch.setdefault(request, []).append(key)
        elif entry.verdict is Verdict.HIT and not entry.holds(now):
            self._settle(key, entry)
            entry.verdict, entry.asked_s = Verdict.WAIT, now
            self._batch.setdefault(request, []).append(key)
        elif entry.verdict is Verdict.WAIT and now - entry.asked_s > self._patience_s:
            entry.verdict = Verdict.MISS
        entry.requests.add(request)
        self._asked.setdefault(request, set()).add(key)
        return entry.verdict

    def take(self) -> list[list[K]]:
        """The keys to look up since the last call, a list a request, in the order asked for."""
        batch, self._batch = self._batch, {}
        wanted = ([k for k in keys if k in self._entries] for keys in batch.values())
        return [keys for keys in wanted if keys]

    def found(self, keys: Sequence[K], promise: Promise[K, P] | None) -> None:
        """The answer for one list of `take`: the keys that a promise holds are hits."""
        held = promise.owed.copy() if promise is not None else set()
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.verdict is not Verdict.WAIT:
                continue  # nobody asks any longer, or it was answered meanwhile
            if key in held:
                held.remove(key)
                entry.verdict, entry.promise = Verdict.HIT, promise
            else:
                entry.verdict = Verdict.MISS
        if promise is not None:
            self._pay(promise, held)

    def loading(self, keys: Collection[K]) -> list[Promise[K, P] | None]:
        """The promise of each key, which its load now fulfils; None where it has none."""
        promises: list[Promise[K, P] | None] = []
        for key in keys:
            entry = self._entries.get(key)
            promises.append(entry.promise if entry is not None else None)
            if entry is not None:
                entry.promise = None
        return promises

    def loaded(
        self, keys: Sequence[K], promises: Sequence[Promise[K, P] | None], good: Collection[K]
    ) -> None:
        """A load has ended: what came is to be asked for anew, what did not come is a miss."""
        for key, promise in zip(keys, promises, strict=True):
            if promise is not None:
                self._pay(promise, {key})
            entry = self._entries.get(key)
            if entry is not None and key not in good:
                self._settle(key, entry)
                entry.verdict = Verdict.MISS

    def finished(self, request: str) -> None:
        """A request that asked has ended; promises that only it heard end with it."""
        self._batch.pop(request, None)
        for key in self._asked.pop(request, ()):
            entry = self._entries[key]
            entry.requests.discard(request)
            if not entry.requests:
                self._settle(key, entry)
                del self._entries[key]

    def over(self) -> list[Promise[K, P]]:
        """Promises of which nothing is owed any more since the last call: release them."""
        over, self._over = self._over, []
        return over

    def clear(self) -> None:
        """Forget everything; all promises are over."""
        for request in list(self._asked):
            self.finished(request)

    def _settle(self, key: K, entry: _Entry[K, P]) -> None:
        promise, entry.promise = entry.promise, None
        if promise is not None:
            self._pay(promise, {key})

    def _pay(self, promise: Promise[K, P], keys: set[K]) -> None:
        before = len(promise.owed)
        promise.owed -= keys
        if before and not promise.owed:
            self._over.append(promise)
