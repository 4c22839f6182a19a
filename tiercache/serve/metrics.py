"""Prometheus metrics. A metric that vLLM has too carries vLLM's name, after `tiercache:`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercache.engine.async_engine import Stream, StreamOutput
from tiercache.engine.sampling import SamplingParams
from tiercache.engine.sequence import RequestOutput

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
        "external_prefix_cache_queries",
        "Tokens of prompts that were looked up in the daemon's tiers.",
    ),
    "external_prefix_cache_hits": ("external_prefix_cache_hits", "Those that were loaded from there."),
}
_TO_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_TO_NEXT_TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_WHOLE_S = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
_TOKENS = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_END_REASONS = ("stop", "length", "abort")


class _EngineCollector(Collector):
    """The engine's own numbers, read at each scrape."""

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
    """Counters and histograms of the requests of one server, and its engine's `stats`.

    Histograms have vLLM's buckets; those of tokens end at `max_model_len`.
    """

    def __init__(self, model: str, max_model_len: int, stats: Callable[[], Stats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, {"model_name": model}))
        self._model = model
        tokens = tuple(count for count in _TOKENS if count <= max_model_len)
        histogram = self._histogram
        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TO_FIRST_TOKEN_S
        )
        self._next_token = histogram("inter_token_latency_seconds", "Between tokens of a sequence.", _TO_NEXT_TOKEN_S)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "The same, mean of a sequence.", _TO_NEXT_TOKEN_S
        )
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE_S)
        self._decode = histogram("request_decode_time_seconds", "From the first to the last token.", _WHOLE_S)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", tokens)
        self._generated = histogram("request_generation_tokens", "Tokens of an answer.", tokens)
        self._max_tokens = histogram("request_params_max_tokens", "Tokens that an answer might have had.", tokens)
        self._n = histogram("request_params_n", "Answers asked for to a prompt.", _CHOICES)
        ended = Counter(
            f"{PREFIX}request_success",
            "Answers that have ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._ended = {reason: ended.labels(model, reason) for reason in _END_REASONS}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._model)

    def text(self) -> bytes:
        """All metrics in Prometheus text format."""
        return generate_latest(self._registry)

    def note_accepted(self, params: SamplingParams) -> None:
        """Count an accepted request."""
        self._n.observe(params.n)
        self._max_tokens.observe(params.max_tokens)

    def note_aborted(self, sequences: int) -> None:
        """Count sequences that were ended because their clients have gone."""
        self._ended["abort"].inc(sequences)

    def watch(self, stream: Stream) -> Callable[[StreamOutput], None]:
        """A function to call with every output of a stream when it comes."""
        first_s: dict[tuple[int, int], float] = {}
        last_s: dict[tuple[int, int], float] = {}

        def note(item: StreamOutput) -> None:
            now_s, sequence = time.perf_counter(), (item.prompt, item.output.index)
            if sequence in last_s:
                self._next_token.observe(now_s - last_s[sequence])
            else:
                first_s[sequence] = now_s
                self._first_token.observe(now_s - stream.submitted_s)
            last_s[sequence] = now_s
            if item.output.result is not None:
                self._note_end(item.output.result, now_s - stream.submitted_s, now_s - first_s[sequence])

        return note

    def _note_end(self, result: RequestOutput, whole_s: float, decode_s: float) -> None:
        self._whole.observe(whole_s)
        self._decode.observe(decode_s)
        self._per_token.observe(decode_s / max(1, len(result.tokens) - 1))
        self._generated.observe(len(result.tokens))
        if result.index == 0:
            self._prompt.observe(result.prompt_tokens)
        self._ended[result.finish_reason].inc()
