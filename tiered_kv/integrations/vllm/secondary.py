"""A secondary tier for vLLM's own offloading: what leaves an engine's CPU memory goes to our node.

For sites that run vLLM's `OffloadingConnector` with `TieringOffloadingSpec` already; the connector
of this package is the shorter way. In `kv_connector_extra_config`:

    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 8 << 30,
    "secondary_tiers": [{"type": "TieredKVTier",
                         "module_path": "tiered_kv.integrations.vllm.secondary"}]

Everything here runs in the scheduler's process and never waits: lookups, copies and calls to the
node are work of background threads, and what they bring is collected in the next step.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiered_kv.integrations.vllm.link import leave, shared
from tiered_kv.integrations.vllm.options import options
from tiered_kv.integrations.vllm.secondary_answers import Answers, Promise, Verdict
from tiered_kv.integrations.vllm.secondary_layout import Placed, in_prefix_order, layout_of
from tiered_kv.integrations.vllm.secondary_shelf import Loan, Shelf
from tiered_kv.supervise import surviving

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger("vllm.tiered_kv")  # below vLLM's own logger, so that it is seen

YIELD_S = 50e-6
"""The scheduler steps as fast as it can while a request waits for a lookup, and hands the GIL to
other threads every 5 ms only: lookups took 17 ms of 6. So it lets them in once a step, as long as
there is a lookup to wait for."""
READERS = 4
"""Threads that look up and load: one that waits for a slow medium must not hold up the others."""

RESULTS = {
    Verdict.HIT: LookupResult.HIT,
    Verdict.MISS: LookupResult.MISS,
    Verdict.WAIT: LookupResult.RETRY,
}
OwnPromise = Promise[bytes, Loan]


class _Loaded(NamedTuple):
    """What came of a load."""

    keys: list[bytes]
    promises: list[OwnPromise | None]
    good: set[bytes]


class TieredKVTier(SecondaryTierManager):
    """See the module. Called by the scheduler's thread alone."""

    def __init__(
        self, offloading_spec: "OffloadingSpec", primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None, *,
        service: Mapping[str, Any] | None = None, address: str | None = None, revision: str = "",
        lookup_wait_s: float = 2.0,
    ) -> None:  # fmt: skip
        """`service` and `address` are those of `tiered_kv.connect`, `revision` names the weights
        (see `secondary_layout.layout_of`), a lookup waits for slower tiers up to `lookup_wait_s`.
        Reads the weights' files once; joins the service in the background. Raises
        `BadConfig` and `BadLayout`."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        given = {"service": service or {}, "address": address, "lookup_wait_s": lookup_wait_s}
        chosen = options(given)
        layout = layout_of(offloading_spec, self.block_size_bytes, revision)
        memory = torch.from_numpy(np.asarray(primary_kv_view).reshape(-1).view(np.uint8))
        self._holes = len(offloading_spec.config.groups) > 1  # windows are not kept from 0 on
        self._link = shared(chosen)
        self._shelf = Shelf(self._link, layout, chosen.config.service, memory, lookup_wait_s)
        self._answers: Answers[bytes, Loan] = Answers(2 * lookup_wait_s)  # a wait, and its answer
        self._found: SimpleQueue[tuple[list[bytes], OwnPromise | None]] = SimpleQueue()
        self._ended: SimpleQueue[tuple[JobResult, _Loaded | None]] = SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, "kv-tier-read")
        self._writer = ThreadPoolExecutor(1, "kv-tier-write")  # in order: parents are known first
        self._running: set[Future[None]] = set()
        self._asking = 0
        logger.info("tiered_kv: a secondary tier for %s", layout.describe())

    def lookup(self, key: "OffloadKey", req_context: "ReqContext") -> LookupResult:
        """RETRY until the node has answered; a HIT is leased."""
        self._collect()
        return RESULTS[self._answers.ask(key, req_context.req_id, time.monotonic())]

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy what lookups promised; keys without a promise fail."""
        chosen = [bytes(key) for key in job_metadata.keys]
        promises = self._answers.loading(chosen)
        self._start(self._readers, self._load, job_metadata, self._placed(job_metadata), promises)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy what the node does not hold yet."""
        self._start(self._writer, self._store, job_metadata, self._placed(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call."""
        results: list[JobResult] = []
        for result, loaded in _drained(self._ended):
            results.append(result)
            if loaded is not None:
                self._answers.loaded(*loaded)
        self._release()
        return results

    def on_new_request(self, req_context: "ReqContext") -> RequestOffloadingContext:
        """New chunks as they come: what the node holds need not be offered again."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: "ScheduleEndContext") -> None:
        """Send this step's lookups off, a call for each request."""
        self._collect()
        for chunks in self._answers.take():
            self._asking += 1
            self._start(self._readers, self._find, chunks)
        self._release()
        if self._asking:
            time.sleep(YIELD_S)

    def on_request_finished(self, req_context: "ReqContext") -> None:
        """Promises that were not used end."""
        self._answers.finished(req_context.req_id)
        self._release()

    def drain_jobs(self) -> None:
        """Wait for all transfers; each ends by itself in bounded time."""
        wait(list(self._running))

    def shutdown(self) -> None:
        """End the threads, give back what is leased, and leave the service."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        self._collect()
        for _, loaded in _drained(self._ended):
            if loaded is not None:
                self._answers.loaded(*loaded)
        self._answers.clear()
        for promise in self._answers.over():
            self._shelf.release(promise.lease)
        self._shelf.close()
        leave(self._link)

    # -- in the scheduler's thread --------------------------------------------------------

    def _placed(self, job: TransferJob) -> list[Placed]:
        size = self.block_size_bytes
        return [
            Placed(bytes(key), int(chunk) * size)
            for key, chunk in zip(job.keys, job.chunk_ids, strict=True)
        ]

    def _start(self, threads: ThreadPoolExecutor, work: Callable[..., None], *args: Any) -> None:
        future = threads.submit(work, *args)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _collect(self) -> None:
        for chunks, promise in _drained(self._found):
            self._asking -= 1
            self._answers.found(chunks, promise)

    def _release(self) -> None:
        for promise in self._answers.over():
            self._start(self._readers, self._shelf.release, promise.lease)

    # -- in background threads: an answer comes whatever happens ----------------------------

    def _find(self, chunks: list[bytes]) -> None:
        promise: OwnPromise | None = None
        with surviving("a lookup of the secondary tier"):
            promise = self._shelf.find(chunks, self._holes)
        self._found.put((chunks, promise))

    def _load(
        self, job: TransferJob, chunks: list[Placed], promises: list[OwnPromise | None]
    ) -> None:
        began = time.monotonic()
        good: set[bytes] = set()
        by_promise: dict[OwnPromise, list[Placed]] = {}
        for chunk, promise in zip(chunks, promises, strict=True):
            if promise is not None:
                by_promise.setdefault(promise, []).append(chunk)
        with surviving("a load of the secondary tier"):
            for promise, mine in by_promise.items():
                good |= self._shelf.load(promise.lease, mine)
        wanted = [chunk.key for chunk in chunks]
        result = self._result(job, began, len(good), len(good) == len(chunks))
        result.successful_keys = [key for key in wanted if key in good] or None
        self._ended.put((result, _Loaded(wanted, promises, good)))

    def _store(self, job: TransferJob, chunks: list[Placed]) -> None:
        began = time.monotonic()
        held = 0
        with surviving("a store of the secondary tier"):
            positions = dict(getattr(job.req_context, "_offload_key_positions", {}))
            held = self._shelf.store(*in_prefix_order(chunks, positions))
        self._ended.put((self._result(job, began, held, held == len(chunks)), None))

    def _result(self, job: TransferJob, began: float, chunks: int, success: bool) -> JobResult:
        return JobResult(
            job_id=job.job_id,
            success=success,
            transfer_time=time.monotonic() - began,
            transfer_bytes=chunks * self.block_size_bytes,
        )


def _drained(queue: "SimpleQueue[Any]") -> Iterable[Any]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
