"""The verbs that store: reserve, commit, abort, persist, flush, forget."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from tiered_kv import liveness
from tiered_kv.errors import BadInput
from tiered_kv.inputs import check_checksums, check_count, check_parents, check_run
from tiered_kv.sessions import Session
from tiered_kv.types import (
    BlockKey,
    Done,
    Fingerprint,
    Held,
    Medium,
    Refused,
    Reservation,
    Run,
    Why,
)
from tiered_kv.wire import Committed
from tiered_kv.works import Works


class Storing(Works):
    """Two-phase stores. See `node.Node`."""

    async def reserve(
        self, layout: Fingerprint, run: Run, owner: str,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> Reservation | Refused:  # fmt: skip
        """Slots of the pool for the blocks of a run that are not held; see `Hierarchy.reserve`.

        Waits up to `store_deadline_s` while room is being made, then drops blocks for it.
        `owner` is the name under which the caller proves that it lives (`liveness.hold`).
        """
        nbytes = self._nbytes(layout)
        self._check_run(layout, run)
        check_parents(parents, len(run))
        if not isinstance(owner, str) or not liveness.is_alive(self.config.shm_folder, owner):
            raise BadInput(f"owner {owner!r} holds no proof of life in {self.config.shm_folder}")
        end = time.monotonic() + self.config.service.store_deadline_s
        while True:
            late = time.monotonic() >= end
            if not await self.keeper.erased(run, end - time.monotonic()):
                return Refused(Why.OFFLINE, "blocks of the run are still being erased below")
            answer = self.hierarchy.reserve(run, layout, nbytes, owner, parents, force=late)
            if isinstance(answer, Reservation):
                if parents is None:  # else a GPU's node makes room, and nobody asked for it
                    self.recording.note("save", tuple(run), nbytes)
                return self._hand_out_slots(answer)
            self._kick()
            if answer.why is not Why.DEMOTING or late:
                self.counts[f"miss.{answer.why}"] += 1
                return answer
            if not await self.mover.wait_any(end - time.monotonic()):
                await asyncio.sleep(0.001)  # nothing moves yet: the tick will start something

    async def commit(
        self, reservation: int, checksums: Sequence[int] | None = None,
        count: int | None = None, session: Session | None = None, durable: bool = False,
    ) -> Committed:  # fmt: skip
        """Make reserved blocks visible, and with `session` the session that ends with them.

        `durable` also waits until the session's blocks have been written below, up to
        `store_deadline_s`; `Committed.durable` says how many were.
        """
        number = self.handles.back(reservation)
        check_checksums(checksums)
        if count is not None:
            check_count("count", count)
        if session is not None:
            session = self._check_session(session)
            self._nbytes(session.layout)
        slots = self.hierarchy.filling(number)
        new = self.hierarchy.commit(number, checksums, count)
        self.parts.pool.generations.publish(slots[:count])
        superseded: Sequence[BlockKey] = ()
        if session is not None:
            superseded = await self.put_session(session)
        self._kick()
        written = await self.persist(session.run) if session is not None and durable else 0
        return Committed(len(new), written, tuple(superseded))

    async def abort(self, reservation: int) -> None:
        """Give reserved slots back unseen. Raises `StaleHandle`."""
        self.hierarchy.abort(self.handles.back(reservation))

    async def put_session(self, session: Session) -> Sequence[BlockKey]:
        """Create or extend a session; the superseded blocks, which are gone from here now."""
        session = self._check_session(session)
        self.leaving.discard(session.id)
        superseded = await self.keeper.put(session)
        self.keeper.erase(self.hierarchy.forget(superseded))
        return superseded

    async def persist(self, run: Run) -> int:
        """Write a run's blocks below and keep them here; how many outlive the processes now.

        Waits up to `store_deadline_s`.
        """
        check_run(run)
        end = time.monotonic() + self.config.service.store_deadline_s
        moves = self.hierarchy.persist(run)
        self._kick()
        await self.mover.wait(moves, end - time.monotonic())
        lasting = [m for m in self.parts.tiers if m is not Medium.HOST]
        written = sum(
            isinstance(a, Held) and any(m in lasting for m in a.tiers)
            for a in self.hierarchy.lookup(run)
        )
        return await self.keeper.persist(run, written, end - time.monotonic())

    async def flush(self) -> int:
        """Write everything that only the pool holds below, sync; how many blocks went."""
        wanted = [k for k, b in self.hierarchy.book.blocks.items()]
        moves = self.hierarchy.persist(wanted)
        self._kick()
        ended = await self.mover.wait(moves, self.config.service.move_deadline_s)
        await self.keeper.flush()
        await self._io(self.parts.sync)
        return sum(isinstance(o, Done) for o in (ended or {}).values())

    async def forget(self, keys: Run) -> int:
        """Drop blocks here and below; how many. Those that others descend from stay."""
        check_run(keys)
        return await self.keeper.forget(keys)

    def _hand_out_slots(self, reservation: Reservation) -> Reservation:
        """The reservation as its owner sees it. When that fails, nothing stays reserved."""
        try:
            generations = self.parts.open_slots(reservation.slots, self.hierarchy)
            self._kick()
        except BaseException:
            self.hierarchy.abort(reservation.id)
            raise
        return replace(reservation, id=self.handles.out(reservation.id), generations=generations)
