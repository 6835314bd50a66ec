"""Carries out moves: one lane up and one lane down a medium, each with its own threads.

A restore never waits behind a demotion, and within the lane down a store goes before a demotion.
A move that misses its deadline is reported to whoever waits, but its slots stay in quarantine
until the thread that copies has really ended: bytes that arrive late must hurt nobody.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tiered_kv.errors import TierBroken, Unreachable
from tiered_kv.generations import Generations
from tiered_kv.tiers.base import Tier
from tiered_kv.types import BlockKey, Done, Failed, Medium, Move, MoveKind, Outcome, Why

log = logging.getLogger(__name__)

LANE_WORKERS = 2
"""Batches at once a lane; each is already as parallel as its medium likes."""


@dataclass
class Leg:
    """Bytes and seconds that a pair of tiers has moved; `seconds` is the sum over batches."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed: int = 0


@dataclass(order=True)
class _Job:
    kind: MoveKind
    number: int
    move: Move = field(compare=False)
    ended: "asyncio.Future[Sequence[Outcome]]" = field(compare=False)


class Mover:
    """Runs batches against the tiers below the pool of this process.

    `done(move, outcomes)` is called on the event loop, once a move, when its copy has ended.
    """

    def __init__(
        self,
        tiers: dict[Medium, Tier],
        pool: Medium,
        generations: Generations,
        done: Callable[[Move, Sequence[Outcome]], None],
    ) -> None:
        self._tiers = tiers
        self._pool = pool
        self._generations = generations
        self._done = done
        self._jobs: dict[int, _Job] = {}
        self._running: dict[int, tuple[float, Medium]] = {}  # move -> when its copy began
        self._number = 0
        self.legs: dict[tuple[Medium, Medium], Leg] = {}
        self._lanes: dict[tuple[Medium, bool], asyncio.PriorityQueue[_Job]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._threads: list[ThreadPoolExecutor] = []
        for medium in tiers:
            for up in (True, False):
                self._open_lane(medium, up)

    def _open_lane(self, medium: Medium, up: bool) -> None:
        queue: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue()
        name = f"kv-{medium}-{'up' if up else 'down'}"
        threads = ThreadPoolExecutor(LANE_WORKERS, thread_name_prefix=name)
        self._lanes[medium, up] = queue
        self._threads.append(threads)
        for _ in range(LANE_WORKERS):
            self._workers.append(asyncio.create_task(self._work(queue, threads), name=name))

    def submit(self, move: Move) -> None:
        """Queue a move. Does not block."""
        up = move.target is self._pool
        self._number += 1
        job = _Job(move.kind, self._number, move, asyncio.get_running_loop().create_future())
        self._jobs[move.id] = job
        self._lanes[move.source if up else move.target, up].put_nowait(job)

    async def wait(
        self, moves: Sequence[int], timeout_s: float
    ) -> dict[BlockKey, Outcome] | None:
        """Wait until all these moves have ended: the outcome of each of their blocks that is not
        long known. None when the time ran out before."""
        jobs = [self._jobs[i] for i in moves if i in self._jobs]
        if not jobs:
            return {}
        ended = [job.ended for job in jobs]
        _, waiting = await asyncio.wait(ended, timeout=max(0.0, timeout_s))
        if waiting:
            return None
        return {
            block.key: outcome
            for job in jobs
            for block, outcome in zip(job.move.blocks, job.ended.result(), strict=True)
        }

    async def wait_any(self, timeout_s: float) -> bool:
        """Wait until some move has ended; False when none is under way or the time ran out."""
        futures = [job.ended for job in self._jobs.values()]
        if not futures:
            return False
        ended, _ = await asyncio.wait(
            futures, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED
        )
        return bool(ended)

    def overdue(self, deadline_s: float) -> set[Medium]:
        """Media with a copy that has been running for longer than `deadline_s`."""
        now = time.monotonic()
        return {medium for began, medium in self._running.values() if now - began > deadline_s}

    @property
    def queued(self) -> int:
        """Moves that were submitted and have not ended."""
        return len(self._jobs)

    async def close(self) -> None:
        """Wait for what runs, drop what waits (its sources are untouched), end the threads."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for threads in self._threads:
            await asyncio.to_thread(threads.shutdown, True, cancel_futures=True)

    async def _work(
        self, queue: "asyncio.PriorityQueue[_Job]", threads: ThreadPoolExecutor
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            job = await queue.get()
            move, began = job.move, time.monotonic()
            up = move.target is self._pool
            self._running[move.id] = began, move.source if up else move.target
            if up:
                self._generations.open(move.targets)
            outcomes = await asyncio.shield(loop.run_in_executor(threads, self._carry, move))
            if up:
                self._generations.publish(
                    [
                        slot
                        for slot, outcome in zip(move.targets, outcomes, strict=True)
                        if isinstance(outcome, Done)
                    ]
                )
            del self._running[move.id]
            self._account(move, outcomes, time.monotonic() - began)
            self._done(move, outcomes)
            del self._jobs[move.id]
            job.ended.set_result(outcomes)

    def _carry(self, move: Move) -> list[Outcome]:
        """In a thread: copy one batch. The supervisor: whatever goes wrong is a counted miss."""
        try:
            if move.target is self._pool:
                return self._tiers[move.source].read(move.blocks, move.targets)
            targets = move.targets or (-1,) * len(move.blocks)
            located = [b._replace(slot=t) for b, t in zip(move.blocks, targets, strict=True)]
            return self._tiers[move.target].write(located, [b.slot for b in move.blocks])
        except (TierBroken, Unreachable) as error:
            return [Failed(Why.OFFLINE, str(error))] * len(move.blocks)
        except Exception as error:  # the one supervisor: an unknown failure becomes a miss
            log.exception("move %s from %s to %s failed", move.id, move.source, move.target)
            return [Failed(Why.IO_ERROR, repr(error))] * len(move.blocks)

    def _account(self, move: Move, outcomes: Sequence[Outcome], seconds: float) -> None:
        leg = self.legs.setdefault((move.source, move.target), Leg())
        copied = sum(isinstance(outcome, Done) and outcome.copied for outcome in outcomes)
        leg.blocks += copied
        leg.bytes += copied * move.nbytes
        leg.seconds += seconds
        leg.failed += sum(isinstance(outcome, Failed) for outcome in outcomes)
