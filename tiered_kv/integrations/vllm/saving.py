"""The worker's saves: from the engine's pages into slots of the node, off the engine's path."""

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiered_kv import liveness
from tiered_kv.attachment import Mapped
from tiered_kv.checksum import checksum
from tiered_kv.errors import BadLayout, StaleHandle, TieredKVError, UnknownSession, Unreachable
from tiered_kv.integrations.vllm.copying import Copying
from tiered_kv.integrations.vllm.jobs import Job
from tiered_kv.integrations.vllm.link import NodeLink
from tiered_kv.integrations.vllm.plans import Span, Store
from tiered_kv.integrations.vllm.tally import Tally
from tiered_kv.layout import KVLayout
from tiered_kv.supervise import surviving
from tiered_kv.types import BlockKey, Refused, Reservation


@dataclass
class _Save:
    store: Store
    job: Job
    mark: object


class Saver:
    """One thread; saves of a request are carried out in order. Called by the engine's thread."""

    def __init__(
        self, link: NodeLink, copying: Copying, layout: KVLayout, rank: int, owner: str,
        patience_s: float, reserve_s: float, tally: Tally,
    ) -> None:  # fmt: skip
        """A save that has not begun to copy after `patience_s` is dropped; the node may make room
        for `reserve_s` (its `store_deadline_s`)."""
        self._link = link
        self._copying = copying
        self._layout = layout
        self._rank = rank
        self._owner = owner
        self._patience_s = patience_s
        self._reserve_s = reserve_s
        self._tally = tally
        self._alive: dict[str, liveness.Alive] = {}
        self._queue: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._open: list[_Save] = []
        self._last: dict[str, Job] = {}  # requests whose pages the engine holds for us
        self._thread = threading.Thread(target=self._work, name="kv-save", daemon=True)
        self._thread.start()

    def submit(self, store: Store) -> None:
        """Queue a save. Does not wait."""
        job = Job(store.request, time.monotonic())
        if store.last:
            self._last[store.request] = job
        save = _Save(store, job, self._copying.ready())
        if not store.spans or not self._link.up:  # nothing to copy, or nobody to copy to
            job.end()
        self._open.append(save)
        self._queue.put(save)

    def drain(self, requests: Sequence[str]) -> None:
        """The pages of these requests go to others now. Waits for copies that run."""
        wanted = set(requests)
        for save in self._open:
            if save.store.request in wanted and not save.job.over:
                save.job.yield_()
                self._tally.add("save.preempted")

    def released(self) -> set[str]:
        """Requests whose pages are no longer needed here. Never waits for the node."""
        late = time.monotonic() - self._patience_s
        for save in self._open:
            if not save.job.over and save.job.began_s < late and save.job.give_up():
                self._tally.add("save.late")
        self._open = [save for save in self._open if not save.job.over]
        busy = {save.store.request for save in self._open}
        free = {r for r, job in self._last.items() if job.over and r not in busy}
        for request in free:
            del self._last[request]
        return free

    def close(self) -> None:
        """Drop what has not begun, wait for the copy that runs. A call to the node that hangs is
        left to itself: the thread ends after it, and with it the proof that its owner lives."""
        for save in self._open:
            save.job.yield_()
        self._queue.put(None)
        self._thread.join(self._patience_s)

    # -- in the thread --------------------------------------------------------------------

    def _work(self) -> None:
        while (save := self._queue.get()) is not None:
            with surviving("saving blocks of a request") as failure:
                try:
                    self._save(save)
                    self._hint(save.store)
                except Unreachable:
                    self._tally.add("save.unreachable")
                except TieredKVError as error:
                    if isinstance(error, BadLayout):  # of a node that has restarted
                        self._link.forget_pool()
                    self._tally.add(f"save.{type(error).__name__}")
            if failure:
                self._tally.add("save.error")
            save.job.end()
            self._tally.stored(save.store.request)
        for proof in self._alive.values():
            proof.close()

    def _save(self, save: _Save) -> None:
        store, rank = save.store, self._rank
        session = store.sessions[rank] if store.sessions else None
        if not store.spans:
            if session is not None:
                self._link.introduce(self._layout)
                self._link.call("put_session", session)
            return
        if save.job.over:
            return
        mapped = self._introduce()
        run = store.keys[rank]
        reserved = self._reserve(mapped, run, store.parents[rank])
        if reserved is None:
            return
        try:
            checksums = self._fill(mapped, reserved, run, store.spans, save)
            if checksums is None:  # preempted: the bytes are no longer those of these blocks
                self._link.give_back(reserved.id)
                return
            self._link.call("commit", reserved.id, checksums, session=session)
        except (StaleHandle, Unreachable):
            self._link.give_back(reserved.id)
            self._link.forget_pool(mapped)
            raise
        except BaseException:
            self._link.give_back(reserved.id)
            raise
        self._tally.add("save.blocks", len(reserved.keys))
        self._tally.add("save.held", reserved.held)

    def _hint(self, store: Store) -> None:
        """After the session was put: a new one would not be known before."""
        if store.sessions and store.said is not None:
            with suppress(UnknownSession):  # its save was refused, or dropped
                self._link.call("hint", store.sessions[self._rank].id, **store.said.verb())

    def _introduce(self) -> Mapped:
        """The pool mapped, and proof there that this process lives."""
        mapped = self._link.introduce(self._layout)
        folder = mapped.welcome.shm_folder
        if folder not in self._alive:
            self._alive[folder] = liveness.hold(Path(folder), self._owner)
        return mapped

    def _reserve(
        self, mapped: Mapped, run: Sequence[BlockKey], parent: BlockKey | None
    ) -> Reservation | None:
        answer: Reservation | Refused = self._link.call(
            "reserve", self._layout.fingerprint, run, self._owner, [parent, *run[:-1]],
            wait_s=self._reserve_s,
        )  # fmt: skip
        self._link.settle()
        if isinstance(answer, Refused):
            self._tally.add(f"save.{answer.why}")
            return None
        try:
            mapped.check(answer.id)
        except StaleHandle:
            self._link.give_back(answer.id)
            self._link.forget_pool(mapped)
            raise
        return answer

    def _fill(
        self, mapped: Mapped, reserved: Reservation, run: Sequence[BlockKey],
        spans: Sequence[Span], save: _Save,
    ) -> list[int] | None:  # fmt: skip
        """Copy what was reserved; checksums, or None when the pages were taken back before."""
        at = {key: i for i, key in enumerate(run)}
        pool, n = mapped.tensor, reserved.nbytes
        slots = [pool[slot : slot + n] for slot in reserved.slots]
        if not save.job.begin():
            return None
        try:
            self._copying.after(save.mark)
            self._copying.into_slots(slots, [spans[at[key]] for key in reserved.keys])
        finally:
            save.job.end()
        return [checksum(slot.numpy().data) for slot in slots]
