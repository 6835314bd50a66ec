"""What the connector did, for vLLM's log and its Prometheus metrics.

Names are those of the counts (`load.tokens`, `save.blocks`, `lookup.late`, ...) with an underscore
for the point: `vllm:tiered_kv_load_tokens_total`, one label set an engine, no other labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "load.requests": "Requests of which a part was loaded",
    "load.tokens": "Tokens that were to be loaded instead of computed",
    "load.blocks": "Blocks that were loaded",
    "load.failed": "Blocks whose load failed: they were computed",
    "load.bytes": "Bytes that were copied into the engine's pages",
    "load.seconds": "Seconds that these copies took",
    "save.blocks": "Blocks that were saved",
    "save.held": "Blocks that the node had already",
    "save.late": "Saves that were dropped because they could not begin in time",
    "lookup.found": "Lookups that found something",
    "lookup.late": "Lookups that took too long",
    "lookup.failed": "Lookups that were not answered",
    "lookup.shared": "Requests that waited for another one's load of the same blocks",
    "decided.load": "Blocks that were worth loading",
    "decided.recompute": "Blocks that were held, and faster to compute again",
    "decided.load_s": "Modelled seconds to the first token, as decided",
    "decided.recompute_s": "Modelled seconds to the first token, had everything been computed",
    "outages": "Times at which the node was lost",
}
GAUGES = {
    "up": "1 while the node of this host answers",
    "prefill_s_per_token": "Measured seconds of prefill a token",
    "copy_bytes_per_s": "Measured rate of copies from the pool into the engine's pages",
}


@dataclass
class Stats(KVConnectorStats):
    """`data` has `counts` since the last snapshot and `now`, values of this moment."""

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Mapping[str, float], now: Mapping[str, float]) -> "Stats":
        """A snapshot."""
        return cls(data={"counts": dict(counts), "now": dict(now)})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counts": {}, "now": {}}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        """Counts add up, what is of this moment is the other's."""
        counts = dict(self.data.get("counts", {}))
        for name, n in other.data.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + n
        now = {**self.data.get("now", {}), **other.data.get("now", {})}
        self.data = {"counts": counts, "now": now}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: what is not zero."""
        found = {**self.data.get("counts", {}), **self.data.get("now", {})}
        return {name: round(value, 6) for name, value in found.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.get("counts", {}).values())


class PromMetrics(KVConnectorPromMetrics):
    """Registers the metrics and feeds them from snapshots."""

    def __init__(
        self, vllm_config: "VllmConfig", metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:  # fmt: skip
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](_metric(name), text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: metric_types[Gauge](_metric(name), text, labelnames=labelnames)
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take a snapshot over. Counts without a metric of their own are for the log only."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, n in transfer_stats_data.get("counts", {}).items():
            if name in self._counters and n > 0:
                self._counters[name].labels(*labels).inc(n)
        for name, value in transfer_stats_data.get("now", {}).items():
            if name in self._gauges:
                self._gauges[name].labels(*labels).set(value)


def _metric(name: str) -> str:
    return "vllm:tiered_kv_" + name.replace(".", "_")
