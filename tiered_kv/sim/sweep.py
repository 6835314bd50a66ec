"""Several replays of one trace, side by side in processes of their own."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.sharedctypes import SynchronizedArray
from typing import NamedTuple

from tiered_kv.errors import BadInput
from tiered_kv.policies import eviction
from tiered_kv.policies.base import Expecting
from tiered_kv.sim.replay import Replayed, replay
from tiered_kv.sim.traces import Trace

POLL_S = 0.2
Progress = Callable[[str, int, int], None]


class Task(NamedTuple):
    """One replay; `hints` tells the policy when sessions are expected back."""

    policy: str
    blocks: int
    hints: bool = False


class _Given(RuntimeError):
    """The sweep ended while this replay was running."""


def tasks_of(policies: Sequence[str], sizes: Sequence[int], hints: bool = False) -> list[Task]:
    """All pairs, each once, and with `hints` once more for each policy that can use them. Raises
    `UnknownName` and `BadInput` before any work."""
    kinds: dict[str, tuple[bool, ...]] = {}
    for name in policies:
        able = isinstance(eviction(name, 1), Expecting)
        kinds[name] = (False, True) if hints and able else (False,)
    for blocks in sizes:
        if blocks < 1:
            raise BadInput(f"a capacity is 1 block or more, not {blocks}")
    sizes = list(dict.fromkeys(sizes))
    return [Task(name, n, told) for name, some in kinds.items() for told in some for n in sizes]


def run_of(trace: Trace, task: Task, progress: Callable[[int], None] | None = None) -> Replayed:
    """Carry out one of them. Raises what the trace raises."""
    hinted = trace.hinted() if task.hints else None
    return replay(trace, task.policy, task.blocks, progress, hinted=hinted)


def sweep(
    trace: Trace, tasks: Sequence[Task], jobs: int, progress: Progress | None = None
) -> list[Replayed]:
    """Replay the trace once for each task, `jobs` at a time; results in the order of the tasks.

    `progress` is told, a few times a second, what runs, requests done and requests in all. Raises
    what the trace raises, and `BadInput` when it has no hints and they are asked for.
    """
    if any(task.hints for task in tasks):
        trace.hinted()
    total = trace.size() * len(tasks)
    if jobs == 1 or len(tasks) == 1:
        return _here(trace, tasks, total, progress)
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", len(tasks) + 1)  # requests done of each; the last one says stop
    with ProcessPoolExecutor(
        min(jobs, len(tasks)), context, initializer=_begin, initargs=(counts,)
    ) as pool:
        try:
            running: list[Future[Replayed]] = [
                pool.submit(_there, trace, task, i) for i, task in enumerate(tasks)
            ]
            left: set[Future[Replayed]] = set(running)
            while left:
                done, left = wait(left, POLL_S, FIRST_COMPLETED)
                for one in done:
                    one.result()
                if progress is not None:
                    text = f"{len(tasks) - len(left)} of {len(tasks)} replays done, requests"
                    progress(text, min(total, sum(counts[:-1])), total)
            return [one.result() for one in running]
        finally:
            counts[len(tasks)] = 1
            pool.shutdown(cancel_futures=True)


def _here(
    trace: Trace, tasks: Sequence[Task], total: int, progress: Progress | None
) -> list[Replayed]:
    found: list[Replayed] = []
    each, spoke = total // max(1, len(tasks)), 0.0

    def step(requests: int) -> None:
        nonlocal spoke
        if progress is not None and time.monotonic() - spoke > POLL_S:
            spoke = time.monotonic()
            text = f"{tasks[len(found)].policy} {tasks[len(found)].blocks}, requests"
            progress(text, len(found) * each + requests, total)

    for task in tasks:
        found.append(run_of(trace, task, step))
    return found


_counts: "SynchronizedArray[int]"


def _begin(counts: "SynchronizedArray[int]") -> None:
    global _counts
    _counts = counts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep tells us


def _there(trace: Trace, task: Task, number: int) -> Replayed:
    def step(requests: int) -> None:
        _counts[number] = requests
        if _counts[len(_counts) - 1]:
            raise _Given("stopped")

    found = run_of(trace, task, step)
    _counts[number] = found.requests
    return found
