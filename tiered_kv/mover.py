"""Carries out moves: one lane up and one lane down a medium, each with its own threads.

A restore never waits behind a demotion, and within the lane down a store goes before a demotion.
A move that misses its deadline is reported to whoever waits, but its slots stay in quarantine
until the thread that copies has really ended: bytes that arrive late must hurt nobody.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tiered_kv.errors import TierBroken, Unreachable
from tiered_kv.generations import Generations
from tiered_kv.pace import Pace
from tiered_kv.supervise import surviving
from tiered_kv.tiers.base import Tier
from tiered_kv.types import BlockKey, Done, Failed, Medium, Move, MoveKind, Outcome, Why

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
        rates: Mapping[Medium, float] | None = None,
    ) -> None:
        """`rates` has the bytes a second that the self-test of a medium read."""
        self._tiers = tiers
        self._pool = pool
        self._generations = generations
        self._done = done
        self._jobs: dict[int, _Job] = {}
        self._running: dict[int, tuple[float, Medium]] = {}  # move -> when its copy began
        self._number = 0
        self._closed = False
        self.legs: dict[tuple[Medium, Medium], Leg] = {}
        self.paces = {medium: Pace((rates or {}).get(medium)) for medium in tiers}
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
        """Queue a move. Does not block. After `close` nothing moves any longer."""
        if self._closed:
            return
        up = move.target is self._pool
        self._number += 1
        job = _Job(move.kind, self._number, move, asyncio.get_running_loop().create_future())
        self._jobs[move.id] = job
        if up:
            self.paces[move.source].submitted(move.nbytes * len(move.blocks))
        self._lanes[move.source if up else move.target, up].put_nowait(job)

    async def wait(self, moves: Sequence[int], timeout_s: float) -> dict[BlockKey, Outcome] | None:
        """Wait until all these moves have ended: the outcome of each of their blocks that is not
        long known. None when the time ran out before, or when nothing moves any longer."""
        if self._closed:
            return None
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

    def give_up(self, medium: Medium, why: str) -> None:
        """Fail the moves that wait for a medium which hangs, so that their sources are free to
        leave in another way. What runs keeps its slots until it has really ended."""
        for (of, _), queue in self._lanes.items():
            while of is medium and not queue.empty():
                job = queue.get_nowait()
                self._end(job, [Failed(Why.OFFLINE, why)] * len(job.move.blocks))

    async def close(self) -> None:
        """End every wait, wait for what runs, drop what waits (its sources are untouched), end
        the threads. Idempotent."""
        self._closed = True
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for job in self._jobs.values():
            n = len(job.move.blocks)
            job.ended.set_result([Failed(Why.OFFLINE, "the node was stopped")] * n)
        self._jobs.clear()
        for threads in self._threads:
            await asyncio.to_thread(threads.shutdown, True, cancel_futures=True)

    async def _work(
        self, queue: "asyncio.PriorityQueue[_Job]", threads: ThreadPoolExecutor
    ) -> None:
        while True:
            job = await queue.get()
            outcomes: list[Outcome] = []
            with surviving(f"a move from {job.move.source} to {job.move.target}") as failure:
                outcomes = await self._run(job.move, threads)
            if failure:
                outcomes = [Failed(Why.IO_ERROR, failure[0])] * len(job.move.blocks)
            self._end(job, outcomes)

    async def _run(self, move: Move, threads: ThreadPoolExecutor) -> list[Outcome]:
        """Copy one batch; its generations are odd meanwhile, and even where a block arrived."""
        began, up = time.monotonic(), move.target is self._pool
        self._running[move.id] = began, move.source if up else move.target
        outcomes: list[Outcome] = []
        shared = self.paces[move.source].began(began) if up else 0.0
        try:
            if up:
                self._generations.open(move.targets)
            loop = asyncio.get_running_loop()
            outcomes = await asyncio.shield(loop.run_in_executor(threads, self._carry, move))
            if up:
                self._generations.publish(
                    [
                        slot
                        for slot, outcome in zip(move.targets, outcomes, strict=True)
                        if isinstance(outcome, Done)
                    ]
                )
        finally:
            del self._running[move.id]
            if up:
                brought = _copied(outcomes) * move.nbytes
                self.paces[move.source].ended(shared, brought, time.monotonic())
        self._account(move, outcomes, time.monotonic() - began)
        return outcomes

    def _end(self, job: _Job, outcomes: list[Outcome]) -> None:
        """Tell the owner and whoever waits. They hear of it even when the owner fails."""
        with surviving(f"what follows a move from {job.move.source} to {job.move.target}"):
            self._done(job.move, outcomes)
        del self._jobs[job.move.id]
        if job.move.target is self._pool:
            self.paces[job.move.source].left(job.move.nbytes * len(job.move.blocks))
        job.ended.set_result(outcomes)

    def _carry(self, move: Move) -> list[Outcome]:
        """In a thread: copy one batch. Whatever else goes wrong here is a counted miss, too."""
        n = len(move.blocks)
        outcomes: list[Outcome] = []
        with surviving(f"move {move.id} from {move.source} to {move.target}") as failure:
            try:
                outcomes = self._copy(move)
            except (TierBroken, Unreachable) as error:
                outcomes = [Failed(Why.OFFLINE, str(error))] * n
            if len(outcomes) != n:
                raise TypeError(f"{len(outcomes)} outcomes came of {n} blocks")
        return [Failed(Why.IO_ERROR, failure[0])] * n if failure else outcomes

    def _copy(self, move: Move) -> list[Outcome]:
        if move.target is self._pool:
            return self._tiers[move.source].read(move.blocks, move.targets)
        targets = move.targets or (-1,) * len(move.blocks)
        located = [b._replace(slot=t) for b, t in zip(move.blocks, targets, strict=True)]
        return self._tiers[move.target].write(located, [b.slot for b in move.blocks])

    def _account(self, move: Move, outcomes: Sequence[Outcome], seconds: float) -> None:
        leg = self.legs.setdefault((move.source, move.target), Leg())
        copied = _copied(outcomes)
        leg.blocks += copied
        leg.bytes += copied * move.nbytes
        leg.seconds += seconds
        leg.failed += sum(isinstance(outcome, Failed) for outcome in outcomes)


def _copied(outcomes: Sequence[Outcome]) -> int:
    """How many blocks were really copied."""
    return sum(isinstance(outcome, Done) and outcome.copied for outcome in outcomes)
