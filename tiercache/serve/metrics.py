"""What Prometheus may scrape. Where vLLM has a metric of the same meaning it has its name, after `tiercache:`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercache.engine.async_engine import Stream, StreamOutput

PREFIX = "tiercache:"
Stats = Mapping[str, float]

_GAUGES = {
    "running": ("num_requests_running", "Sequences that are being computed."),
    "loading": ("num_requests_loading", "Sequences that wait for blocks from the cache."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of the KV pool in use; 1 is all of it."),
    "pool_blocks": ("engine_pool_blocks", "Blocks of the KV pool."),
    "idle_blocks": ("engine_idle_blocks", "Blocks of the KV pool that no sequence holds."),
}
_COUNTERS = {
    "preemptions": ("num_preemptions", "Sequences that gave their blocks back to others."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens of prompts that were looked up in the KV pool."),
    "prefix_cache_hits": ("prefix_cache_hits", "Those that were found there."),
    "external_prefix_cache_queries": (
        "external_prefix_cache_queries", "Tokens of prompts that were looked up in the daemon's tiers."
    ),
    "external_prefix_cache_hits": ("external_prefix_cache_hits", "Those that were loaded from there."),
}  # fmt: skip
_LATENCIES_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class _EngineCollector(Collector):
    """The engine's own numbers, read when somebody scrapes."""

    def __init__(self, stats: Callable[[], Stats], labels: Mapping[str, str]) -> None:
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        waiting = stats["waiting"] + stats["loading"]  # as vLLM counts them
        yield self._metric(GaugeMetricFamily, "num_requests_waiting", "Sequences that wait for their turn.", waiting)
        for key, value in stats.items():
            if key in _GAUGES:
                yield self._metric(GaugeMetricFamily, *_GAUGES[key], value)
            elif key != "waiting":
                other = (f"engine_{key.removesuffix('_count')}", f"The engine's counter {key}.")
                name, text = _COUNTERS.get(key, other)
                yield self._metric(CounterMetricFamily, name, text, value)

    def _metric(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


class Metrics:
    """Counters and histograms of the requests of one server, and its engine's `stats`."""

    def __init__(self, model: str, stats: Callable[[], Stats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, {"model_name": model}))
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", model)
        self._next_token = self._histogram("inter_token_latency_seconds", "Between tokens of a sequence.", model)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", model)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", model, _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Tokens of an answer.", model, _TOKENS)
        self._ended = Counter(
            f"{PREFIX}request_success", "Answers that were finished.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._model = model

    def _histogram(
        self, name: str, text: str, model: str, buckets: tuple[float, ...] = _LATENCIES_S
    ) -> Histogram:
        return Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(model)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def watch(self, stream: Stream) -> Callable[[StreamOutput], None]:
        """What is to be called with every output of a stream when it comes."""
        last_s: dict[tuple[int, int], float] = {}

        def note(item: StreamOutput) -> None:
            now_s, sequence = time.perf_counter(), (item.prompt, item.output.index)
            if sequence in last_s:
                self._next_token.observe(now_s - last_s[sequence])
            else:
                self._first_token.observe(now_s - stream.submitted_s)
            last_s[sequence] = now_s
            if (result := item.output.result) is not None:
                self._whole.observe(now_s - stream.submitted_s)
                self._generated.observe(len(result.tokens))
                if item.output.index == 0:
                    self._prompt.observe(result.prompt_tokens)
                self._ended.labels(self._model, result.finish_reason).inc()

        return note
