"""vLLM's own offloading tiers on a CPU: the one part that vLLM has for GPUs only.

`TieringOffloadingSpec` keeps its chunks in host memory and refuses to start without a GPU, since
its copies are made by CUDA. Here they are made by numpy between the engine's KV and the same
shared memory region, merged into runs; all else (lookup, eviction, file tier) is vLLM's. Numpy
rather than torch: on cores that others use too, torch's threads wait for each other in every copy.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Array = npt.NDArray[np.int8]


class Run(NamedTuple):
    """`n` pages, one behind the other on both sides: within a chunk, or in chunks of a page."""

    engine: int
    chunk: int
    page: int
    n: int


def runs(engine: Sequence[int], chunks: Sequence[int], skip: int, pages: int) -> Iterator[Run]:
    """Where the engine's pages lie in chunks of `pages` pages, the first `skip` of them left out;
    merged as far as both sides count up by one."""
    last: Run | None = None
    for i, row in enumerate(engine):
        nth, page = divmod(skip + i, pages)
        chunk = chunks[nth]
        if last is not None:
            follows = chunk == last.chunk if pages > 1 else chunk == last.chunk + last.n
            if follows and row == last.engine + last.n:
                last = last._replace(n=last.n + 1)
                continue
            yield last
        last = Run(row, chunk, page, 1)
    if last is not None:
        yield last


class CpuCopies(OffloadingWorker):
    """Copies pages between the engine's tensors and the region, at once and in the caller."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, pages: int) -> None:
        self._region = region
        self._pages = pages
        self._done: list[TransferResult] = []
        if len(caches.group_data_refs) != 1:
            raise ValueError(f"{len(caches.group_data_refs)} KV cache groups, not one")
        self._sides: list[tuple[Array, Array]] = []
        for one in caches.tensors:
            size = one.page_size_bytes
            rows = region.create_next_worker_view(size * pages)
            flat = one.tensor.view(torch.int8).view(-1, size)
            self._sides.append((flat.numpy(), rows.unflatten(1, (pages, size)).numpy()))
        self._page_bytes = sum(one.page_size_bytes for one in caches.tensors)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Engine to host memory."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """Host memory to engine."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: every copy ended within its submission."""

    def shutdown(self) -> None:
        """Let the region go; its file disappears with the engine's side of it."""
        self._sides = []
        self._region.cleanup()

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, host: Any, store: bool) -> bool:
        began = time.perf_counter()
        rows, chunks = engine.block_ids.tolist(), host.block_ids.tolist()
        skip = engine.block_indices[0] % self._pages if rows else 0
        for run in runs(rows, chunks, skip, self._pages):
            for mine, theirs in self._sides:
                near = mine[run.engine : run.engine + run.n]
                if self._pages == 1:
                    far = theirs[run.chunk : run.chunk + run.n, 0]
                else:
                    far = theirs[run.chunk, run.page : run.page + run.n]
                np.copyto(*((far, near) if store else (near, far)))
        took = time.perf_counter() - began
        self._done.append(TransferResult(job_id, True, len(rows) * self._page_bytes, took))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with copies made by the CPU."""

    _copies: CpuCopies | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Made once."""
        if self._copies is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id, num_chunks=self.num_chunks, rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._copies = CpuCopies(kv_caches, region, self.blocks_per_chunk)
        return self._copies
