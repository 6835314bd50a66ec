"""The worker's side: pages that the engine registered, and the transfers that read or fill them."""

import threading
from typing import TYPE_CHECKING

import torch

from tiered_kv import pages as system
from tiered_kv.arena import Arena
from tiered_kv.attachment import Mapped
from tiered_kv.errors import DoesNotFit, TieredKVError
from tiered_kv.integrations.vllm import identity
from tiered_kv.integrations.vllm.copying import copying
from tiered_kv.integrations.vllm.link import NodeLink
from tiered_kv.integrations.vllm.loading import Loader
from tiered_kv.integrations.vllm.options import Options
from tiered_kv.integrations.vllm.pages import Pages, planes_of
from tiered_kv.integrations.vllm.plans import Introduction, Step, Store, Told
from tiered_kv.integrations.vllm.saving import Saver
from tiered_kv.integrations.vllm.tally import Tally
from tiered_kv.supervise import surviving

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

WAIT_FOR_NODE_S = 600.0


class Working:
    """One rank of an engine. Every method is called by the engine's thread and waits for copies
    at most, never for the node."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", link: NodeLink,
        options: Options, caches: dict[str, torch.Tensor], rank: int, owner: str,
    ) -> None:  # fmt: skip
        """May read the weights' files once. Raises `UnsupportedCache` and `BadLayout`."""
        page = identity.page_tokens(kv_cache_config)
        group = identity.group_size(options, page)
        pages = Pages(planes_of(caches, kv_cache_config.num_blocks), group)
        self.layout = identity.layout_of(vllm_config, kv_cache_config, pages, options, rank)
        self.owner = owner
        self.tally = Tally()
        self._idle = False
        self._link = link
        service = options.config.service
        copies = copying(pages)
        self._saver = Saver(
            link, copies, self.layout, rank, owner, options.save_wait_s, service.store_deadline_s,
            self.tally,
        )  # fmt: skip
        self._loader = Loader(
            link, pages, copies, self.layout, rank, service.wake_deadline_s, service.lease_ttl_s,
            options.verify, self.tally,
        )  # fmt: skip
        self._preparing = threading.Thread(target=self._prepare, name="kv-prepare", daemon=True)
        self._preparing.start()

    def introduction(self) -> Introduction:
        """For the scheduler's side."""
        return Introduction(self.layout, self.owner)

    def start(self, step: Step, idle: bool = False) -> None:
        """Begin what a step asks for. `idle`: the engine computes nothing in it."""
        self._idle = idle
        for store in step.stores:
            self._saver.submit(store)
        for load in step.loads:
            self._loader.submit(load)

    def store(self, store: Store) -> None:
        """Begin a save outside of a step."""
        self._saver.submit(store)

    def drain(self, step: Step) -> None:
        """Before the step's pages are overwritten: those of preempted requests."""
        if step.preempted:
            self._saver.drain(tuple(step.preempted))

    def wait_layer(self, layer: str) -> None:
        """Until a layer of the step's loads by layers is there."""
        self._loader.wait_layer(layer)

    def finished(self) -> tuple[set[str], set[str]]:
        """(requests whose saves, requests whose loads) need their pages no longer."""
        return self._saver.released(), self._loader.arrived(self._idle)

    def failed(self) -> set[int]:
        """Pages whose load failed. Call after `finished` of the same step."""
        return self._loader.failed()

    def told(self) -> Told | None:
        """What happened since the last call, for the scheduler's side."""
        return self.tally.take()

    def close(self) -> None:
        """End all transfers."""
        self._loader.close()
        self._saver.close()

    def _prepare(self) -> None:
        """In a thread: map the pool as soon as there is a node, so that the first load need not
        make page tables, and pin it where there is a GPU."""
        if not self._link.wait(WAIT_FOR_NODE_S):
            return
        with surviving("mapping the node's pool"):
            try:
                mapped: Mapped = self._link.introduce(self.layout)
                if isinstance(mapped.pool, Arena):
                    if torch.cuda.is_available():
                        mapped.pool.pin()
                    else:
                        system.prefault(mapped.pool.address, mapped.pool.capacity_bytes)
            except DoesNotFit:
                self.tally.add("pin.refused")
            except TieredKVError:
                self.tally.add("prepare.failed")
