"""What the connector tells vLLM's log and its Prometheus metrics."""

from types import SimpleNamespace

from connector_kit import Engine, Scripted
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tiered_kv.integrations.vllm.metrics import COUNTERS, GAUGES, PromMetrics, Stats


def metrics(registry):
    def in_registry(kind):
        return lambda name, text, labelnames: kind(name, text, labelnames, registry=registry)

    kinds = {Counter: in_registry(Counter), Gauge: in_registry(Gauge), Histogram: None}
    config = SimpleNamespace(kv_transfer_config=None)
    return PromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})


def test_counts_add_up_and_values_of_the_moment_are_the_latest():
    stats = Stats.of({"load.tokens": 512, "save.full": 1}, {"up": 1.0})
    stats.aggregate(Stats.of({"load.tokens": 256}, {"up": 0.0}))
    assert stats.reduce() == {"load.tokens": 768, "save.full": 1}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_metrics_of_each_engine_are_its_own():
    registry = CollectorRegistry()
    prom = metrics(registry)
    prom.observe(Stats.of({"load.tokens": 512, "save.some_reason": 3}, {"up": 1.0}).to_dict(), 0)
    prom.observe(Stats.of({"load.tokens": 88}, {"up": 0.0}).to_dict(), 1)
    prom.observe(Stats.of({"load.tokens": 8}, {}).to_dict(), 0)
    value = registry.get_sample_value
    assert value("vllm:tiered_kv_load_tokens_total", {"engine": "0"}) == 520
    assert value("vllm:tiered_kv_load_tokens_total", {"engine": "1"}) == 88
    assert value("vllm:tiered_kv_up", {"engine": "0"}) == 1
    assert value("vllm:tiered_kv_up", {"engine": "1"}) == 0


def test_every_metric_has_a_name_that_prometheus_takes():
    metrics(CollectorRegistry())
    assert all("." not in name or name.replace(".", "_").isidentifier() for name in COUNTERS)
    assert not set(COUNTERS) & set(GAUGES)


def test_a_snapshot_has_what_happened_since_the_last_one():
    scheduling = Engine(Scripted()).s
    scheduling.counts["load.tokens"] += 100
    scheduling.seconds["decided.load_s"] += 0.5
    first = scheduling.stats()
    assert first.data["counts"] == {"load.tokens": 100, "decided.load_s": 0.5}
    assert scheduling.stats().is_empty()
    scheduling.counts["load.tokens"] += 1
    assert scheduling.stats().data["counts"] == {"load.tokens": 1}
    scheduling._link.outages += 1
    assert scheduling.stats().data == {
        "counts": {"outages": 1},
        "now": {"up": 1.0, "prefill_s_per_token": 0.0, "copy_bytes_per_s": 0.0},
    }
