"""One vLLM engine of bench_vllm.py, in a process of its own: lines of JSON in, lines of JSON out.

    {"op": "run", "prompts": [[...]], "tokens": 1} -> {"seconds": ..., "cpu_s": ..., "tokens": [[...]], "cached": [...]}
    {"op": "forget"}      vLLM forgets its own prefix cache
    {"op": "offloaded"}   vLLM forgets what it has offloaded itself
    {"op": "hooks"}       microseconds of our hooks in the scheduler, by name: p50, p99, max, and all together
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import vllm_lmcache

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
)  # fmt: skip
HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups",
)  # fmt: skip
TIER_HOOKS = ("submit_store", "submit_load", "lookup", "get_finished_jobs", "on_schedule_end")


def watch(connector: Any, hooks: Sequence[str]) -> dict[str, list[float]]:
    """Time every call of the scheduler's hooks."""
    took_us: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, hook: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return hook(*arguments, **options)
            finally:
                took_us[name].append((time.perf_counter_ns() - start) / 1000)

        return call

    for name in hooks:
        setattr(connector, name, timed(name, getattr(connector, name)))
    return took_us


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
    took_us = watch(tiers[0], TIER_HOOKS) if tiers else watch(connector, HOOKS) if connector is not None else {}

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
            answer = {}
            for name, values in took_us.items():
                values.sort()
                answer[name] = [values[len(values) // 2], values[len(values) * 99 // 100], values[-1], sum(values)]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
