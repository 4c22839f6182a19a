"""One vLLM engine of bench_vllm.py, in a process of its own: lines of JSON in, lines of JSON out.

{"op": "run", "prompts": [[...]], "tokens": 1} -> {"seconds": ..., "cpu_s": ..., "tokens": [[...]], "cached": [...]}
{"op": "forget"}      vLLM forgets its own prefix cache
{"op": "offloaded"}   vLLM forgets what it has offloaded itself
{"op": "hooks"}       of our hooks in the scheduler, by name: calls, and microseconds on the clock ("wall"), of
                      their thread ("thread") and in the collector: p50, p99, max, sum. "nothing" does nothing
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import vllm_lmcache

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)
NOTHING = "nothing"
TIER_HOOKS = ("submit_store", "submit_load", "lookup", "get_finished_jobs", "on_schedule_end")


class Call(NamedTuple):
    """One call of a hook: nanoseconds on the clock, those that its thread ran, and those in the garbage collector."""

    wall_ns: int
    thread_ns: int
    collector_ns: int


class Watch:
    """Times every call of some hooks of a connector.

    What a call takes on the clock and its thread did not run is other threads' and processes' turns, or a wait.
    """

    def __init__(self, connector: Any, hooks: Sequence[str]) -> None:
        self.calls: dict[str, list[Call]] = {name: [] for name in (*hooks, NOTHING)}
        self._collector_ns = self._collecting_since_ns = 0
        gc.callbacks.append(self._collects)
        for name in hooks:
            setattr(connector, name, self._timed(name, getattr(connector, name)))
        nothing = self._timed(NOTHING, lambda: None)
        for _ in range(1000):
            nothing()

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since_ns = time.perf_counter_ns()
        else:
            self._collector_ns += time.perf_counter_ns() - self._collecting_since_ns

    def _timed(self, name: str, hook: Any) -> Any:
        calls = self.calls[name]

        def call(*arguments: Any, **options: Any) -> Any:
            collector_ns, thread_ns, start_ns = self._collector_ns, time.thread_time_ns(), time.perf_counter_ns()
            try:
                return hook(*arguments, **options)
            finally:
                wall_ns = time.perf_counter_ns() - start_ns
                calls.append(Call(wall_ns, time.thread_time_ns() - thread_ns, self._collector_ns - collector_ns))

        return call

    def figures(self) -> dict[str, dict[str, Any]]:
        """The figures of each hook that was called, as the module describes them."""
        return {name: _figures(calls) for name, calls in self.calls.items() if calls}


def _figures(calls: list[Call]) -> dict[str, Any]:
    figures: dict[str, Any] = {"calls": len(calls)}
    for field in Call._fields:
        values = sorted(getattr(call, field) / 1000 for call in calls)
        late = values[len(values) * 99 // 100]
        part = {"p50": values[len(values) // 2], "p99": late, "max": values[-1], "sum": sum(values)}
        figures[field.removesuffix("_ns")] = part
    return figures


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    options = json.loads(sys.argv[1])
    if options.get("kv_transfer_config", {}).get("kv_connector") == vllm_lmcache.CONNECTOR:
        vllm_lmcache.mend_llvmlite()
    llm = LLM(**options)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    connector = core.scheduler.connector
    offloading = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    tiers = getattr(offloading, "secondary_tiers", [])
    watched = tiers[0] if tiers else connector
    watch = Watch(watched, () if watched is None else TIER_HOOKS if tiers else HOOKS)

    def run(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        while core.scheduler.has_requests():  # as an engine process goes on after the last token
            llm.llm_engine.step()
        return {
            "seconds": seconds,
            "cpu_s": time.process_time() - cpu_s,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["op"] == "run":
            answer: dict[str, Any] = run(order["prompts"], order["tokens"])
        elif order["op"] == "forget":
            answer = {"done": llm.reset_prefix_cache()}
        elif order["op"] == "offloaded":
            assert offloading is not None
            offloading.primary_tier.reset_cache()
            answer = {"done": True}
        else:
            answer = watch.figures()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
