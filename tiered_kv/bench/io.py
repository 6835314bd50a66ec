"""`tiered-kv bench io`: every leg between two media, each against the bare medium."""

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from tiered_kv.bench import io_hbm, io_nvme
from tiered_kv.bench.contest import Contender, contest, judge
from tiered_kv.bench.report import Result
from tiered_kv.errors import BadInput, UnknownName
from tiered_kv.types import ALIGNMENT

BAR = 0.85
BAR_FROM_BYTES = 2 << 20
"""Smaller blocks are reported without a bar: they are bound by calls, not by the medium."""

SIZES = (256 << 10, 2 << 20, 8 << 20)
WORKING_SET_BYTES = 256 << 20
LEGS = (*io_nvme.LEGS, *io_hbm.LEGS)
ENGINES = (*io_nvme.ENGINES, *io_hbm.ENGINES)


def run(
    *,
    folder: Path,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    seconds: float = 180.0,
    legs: Collection[str] = LEGS,
    engines: Collection[str] = ENGINES,
    nbytes: int = WORKING_SET_BYTES,
    progress: Callable[[str], None] | None = None,
) -> list[Result]:
    """Measure, and return `io/<leg>/<engine>/<block bytes>` in GB/s and, with `/cpu-s-per-gb`
    appended, CPU seconds a GB, for ours and for every bare contender.

    Takes `nbytes` (a multiple of four times each size) of shared memory, as much again for HBM
    where there is no GPU, and four times as much below `folder`; all is removed afterwards.
    `seconds` is a budget: when it is used up, each leg gets three rounds. Raises `UnknownName`,
    `BadInput`, `DoesNotFit`, or `TierBroken` when a block fails.
    """
    _check(sizes, nbytes, legs, engines)
    say = progress or (lambda _: None)
    deadline_s = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with ExitStack() as stack:
        for group, names in _groups(stack, folder, nbytes, legs, engines):
            say(group.describe())
            for size in sizes:
                group.prepare(size)
                for leg in names:
                    say(f"{leg}, blocks of {size} bytes")
                    rivals = group.contenders(leg, size)
                    passes = contest(rivals, rounds, deadline_s)
                    bar = BAR if size >= BAR_FROM_BYTES else None
                    results += judge(leg, size, nbytes, rivals, passes, bar)
    return results


class _Legs(Protocol):
    """Legs that share their files or memories."""

    def describe(self) -> str: ...

    def prepare(self, block_bytes: int) -> None: ...

    def contenders(self, leg: str, block_bytes: int) -> list[Contender]: ...


def _groups(
    stack: ExitStack, folder: Path, nbytes: int, legs: Collection[str], engines: Collection[str]
) -> Iterator[tuple[_Legs, list[str]]]:
    """Opened legs with the names that are wanted of them; `stack` closes and removes them."""
    scratch = Path(tempfile.mkdtemp(prefix="bench-io-", dir=folder))
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    if wanted := [leg for leg in io_nvme.LEGS if leg in legs]:
        with io_nvme.open_legs(scratch, nbytes, engines) as nvme:
            yield nvme, wanted
    if wanted := [leg for leg in io_hbm.LEGS if leg in legs]:
        with io_hbm.open_legs(nbytes, engines) as hbm:
            yield hbm, wanted


def _check(
    sizes: Sequence[int], nbytes: int, legs: Collection[str], engines: Collection[str]
) -> None:
    for kind, names, known in (("leg", legs, LEGS), ("engine", engines, ENGINES)):
        for name in names:
            if name not in known:
                raise UnknownName(f"{kind} {name!r} is not one of {', '.join(known)}")
    for size in sizes:
        if size < ALIGNMENT or size % ALIGNMENT or nbytes % (4 * size):
            raise BadInput(f"{nbytes} bytes do not hold 4 x n blocks of {size} bytes")
