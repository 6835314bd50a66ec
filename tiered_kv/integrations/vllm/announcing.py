"""The node's block events, as an engine's KV events for routers: asked for between steps."""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tiered_kv.integrations.vllm.asking import Asking
from tiered_kv.integrations.vllm.events import EventTranslator
from tiered_kv.integrations.vllm.link import NodeLink
from tiered_kv.types import BlockKey
from tiered_kv.wire import Events

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

POLL_S = 0.25
CAPACITY = 1 << 16
"""Blocks that are remembered to be announced, about 3 KB each."""


class Announcing:
    """Called by the engine's thread; waits for nothing. Only where the engine publishes events."""

    def __init__(self, link: NodeLink, asking: Asking, page: int, group: int) -> None:
        """`page` is tokens of an engine page, `group` pages of a block."""
        self._link = link
        self._asking = asking
        self._page = page
        self._group = group
        self._translator = EventTranslator(page, CAPACITY)
        self._polling: Future[Events | None] | None = None
        self._polled_s = 0.0
        self._up = False
        self.counts: Counter[str] = Counter()

    def note(self, request: "Request", keys: Sequence[BlockKey], first: int, end: int) -> None:
        """This engine stores or loads the blocks `keys` (of rank 0): from its block `first` on,
        up to page `end`."""
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        lora = request.lora_request
        hashes, tokens = request.block_hashes, request.all_token_ids
        for at, key in reversed(list(enumerate(keys, first))):  # heads are forgotten last
            start, stop = at * self._group, min((at + 1) * self._group, end)
            extra = [
                generate_block_hash_extra_keys(request, i * self._page, (i + 1) * self._page, 0)[0]
                for i in range(start, stop)
            ]
            self._translator.note(
                key, hashes[start:stop], hashes[start - 1] if start else None,
                tokens[start * self._page : stop * self._page],
                lora.lora_int_id if lora else None, extra if any(extra) else None,
                lora_name=lora.lora_name if lora else None,
            )  # fmt: skip

    def take(self) -> "list[KVCacheEvent]":
        """What changed for routers since the last call."""
        if self._up and not self._link.up:
            self._up, self._polling = False, None
            return self._translator.lost()
        self._up = self._link.up
        found: list[KVCacheEvent] = []
        if self._polling is not None and self._polling.done():
            events = self._polling.result()
            self._polling = None
            if events is not None:
                found = self._translator.translate(events)
        now = time.monotonic()
        if self._up and self._polling is None and now - self._polled_s >= POLL_S:
            self._polled_s = now
            self._polling = self._asking.events(self._translator.since)
        self.counts["events"] += len(found)
        return found
