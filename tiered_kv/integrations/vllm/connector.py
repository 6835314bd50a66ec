"""`TieredKVConnector`: vLLM keeps and finds its KV in the node of its host.

    KVTransferConfig(
        kv_connector="TieredKVConnector",
        kv_connector_module_path="tiered_kv.integrations.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )

vLLM makes one object for the scheduler and one for each worker. Both are thin: `Scheduling`
decides, `Working` copies, and neither ever waits for the service.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tiered_kv.errors import BadConfig
from tiered_kv.integrations.vllm import identity, link
from tiered_kv.integrations.vllm.metrics import PromMetrics, Stats
from tiered_kv.integrations.vllm.names import Names
from tiered_kv.integrations.vllm.options import options
from tiered_kv.integrations.vllm.plans import Introduction, Step, Told
from tiered_kv.integrations.vllm.scheduling import Scheduling
from tiered_kv.integrations.vllm.working import Working

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_WORKERS: dict[str, Working] = {}
"""Workers of this process by their owner's name: with one rank, the scheduler is beside it."""


class TieredKVConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Raises `UnsupportedCache` at the start for caches that it cannot keep
    exactly, and `BadConfig` for an extra config that it does not know."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise BadConfig(
                f"kv_load_failure_policy={transfer.kv_load_failure_policy!r} fails requests whose "
                "blocks cannot be loaded; set 'recompute'"
            )
        identity.check_supported(vllm_config, kv_cache_config)
        self._options = options(transfer.kv_connector_extra_config)
        self._link = link.shared(self._options)
        self._working: Working | None = None
        self._scheduling: Scheduling | None = None
        self._closed = False

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """All layers of a page side by side on GPUs, so that a page is one copy."""
        from vllm.platforms import current_platform

        return "BLHNC" if current_platform.is_cuda_alike() else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Waiting layer by layer cannot be captured."""
        return extra_config.get("load") == "layerwise"

    # -- worker ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV tensors by layer."""
        from vllm.distributed import get_pp_group, get_tp_group

        tp = get_tp_group()
        rank = get_pp_group().rank_in_group * tp.world_size + tp.rank_in_group
        owner = f"vllm-{rank}-{uuid.uuid4().hex}"
        self._working = _WORKERS[owner] = Working(
            self._vllm_config, self._kv_cache_config, self._link, self._options, kv_caches, rank,
            owner,
        )  # fmt: skip

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler's side must know of this worker."""
        return None if self._working is None else self._working.introduction()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before pages of preempted requests are overwritten: end the saves that read them."""
        if self._working is not None and isinstance(kv_connector_metadata, Step):
            self._working.drain(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Begin the step's loads and saves. Does not wait."""
        step = self._get_connector_metadata()
        if self._working is not None and isinstance(step, Step):
            idle = getattr(forward_context, "attn_metadata", None) is None
            self._working.start(step, idle)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Until this layer of the step's loads by layers is there."""
        if self._working is not None:
            self._working.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: what a step computes is saved in the next one."""

    def wait_for_save(self) -> None:
        """Nothing: pages that are being saved are not given away."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose pages need no longer be held for saves, requests whose load ended)."""
        if self._working is None:
            return None, None
        sent, received = self._working.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that did not get their bytes."""
        return set() if self._working is None else self._working.failed()

    def build_connector_worker_meta(self) -> Told | None:
        """What was copied since the last step."""
        return None if self._working is None else self._working.told()

    # -- scheduler ------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have introduced themselves: from now on there is something to look for."""
        found = [one for one in metadata.values() if isinstance(one, Introduction)]
        workers = sorted(found, key=lambda one: one.layout.tp_rank)
        if len(workers) != self._vllm_config.parallel_config.world_size:
            raise BadConfig(
                f"{len(workers)} of {self._vllm_config.parallel_config.world_size} workers run "
                "TieredKVConnector"
            )
        page = identity.page_tokens(self._kv_cache_config)
        secret = self._options.config.service.tenant_secret.encode()
        group = identity.group_size(self._options, page)
        names = Names([one.layout for one in workers], secret, group)
        beside = _WORKERS.get(workers[0].owner) if len(workers) == 1 else None
        self._scheduling = Scheduling(
            self._link, self._options, names, page, beside, events=self._publishes_events()
        )

    def on_new_request(self, request: "Request") -> None:
        """A request was queued."""
        if self._scheduling is not None:
            self._scheduling.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind those that the engine has; None: not known yet."""
        if self._scheduling is None:
            return 0, False
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """The engine has given pages to a request."""
        if self._scheduling is not None:
            self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Step:
        """What the workers shall do in this step."""
        if self._scheduling is None:
            return Step()
        return self._scheduling.step(
            scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids,
            self._pages_of, time.monotonic(),
        )  # fmt: skip

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """What the workers did."""
        if self._scheduling is None:
            return
        told = connector_output.kv_connector_worker_meta
        self._scheduling.heard(
            told if isinstance(told, Told) else None,
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids or (),
        )

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's pages must wait for a save."""
        if self._scheduling is None:
            return False, None
        return self._scheduling.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """There is one group: `check_supported` has refused others."""
        return self.request_finished(request, block_ids[0])

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """What changed in the node's tiers, in vLLM's own events."""
        return () if self._scheduling is None else self._scheduling.events()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What happened since the last call: of the scheduler's side, which hears of all ranks."""
        return None if self._scheduling is None else self._scheduling.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """A snapshot that crossed to the logging process."""
        return Stats(data=data) if data else Stats.of({}, {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: "VllmConfig", metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:  # fmt: skip
        """Metrics named `vllm:tiered_kv_*`; see `metrics`."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Find nothing of what was kept so far: vLLM asks for that when weights were changed in
        place. Other engines share what the node holds, so it stays, under names that this engine
        does not use any more."""
        if self._scheduling is not None:
            self._scheduling.reset()
        return True

    def shutdown(self) -> None:
        """End transfers and let go of the node. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._working is not None:
            self._working.close()
            _WORKERS.pop(self._working.owner, None)
        if self._scheduling is not None:
            self._scheduling.close()
        link.leave(self._link)

    def _publishes_events(self) -> bool:
        config = self._vllm_config.kv_events_config
        return config is not None and bool(config.enable_kv_cache_events)

    def _pages_of(self, request_id: str) -> Sequence[int] | None:
        assert self._kv_cache_manager is not None
        groups: Iterable[list[int]] = self._kv_cache_manager.get_block_ids(request_id)
        return next(iter(groups), None)
