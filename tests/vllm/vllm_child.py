"""A process with one vLLM engine in it, that does what lines of JSON on its stdin say.

{"op": "generate", "prompts": [[...]], "max_tokens": 8} -> {"tokens": [[...]], "cached": [...]}
    "lora": [name, number, folder], "salt": "..."; "embeds": seed, for noise in place of the prompts' tokens
{"op": "forget"}      vLLM forgets its own prefix cache
{"op": "offloaded"}   vLLM forgets what it has offloaded itself
{"op": "reset"}       as after an update of the weights: the connector's cache too
{"op": "negate"}      all KV in the pool, as damage that changes what is computed from it
{"op": "check"}       the scheduler's books, and its counts
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", VLLM_LOGGING_LEVEL="WARNING",
    OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind",
)  # fmt: skip


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(**json.loads(sys.argv[1]))
    if llm.llm_engine.vllm_config.parallel_config.pipeline_parallel_size > 1:
        llm.collective_rpc("execute_dummy_batch")  # else later stages of an eager engine on a CPU have no buffers
    model = llm.llm_engine.vllm_config.model_config
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    scheduler = getattr(core.scheduler.connector, "_scheduler", None)
    offloading = getattr(core.scheduler.connector, "connector_scheduler", None)
    tier = offloading.manager.secondary_tiers[0] if offloading is not None else None
    happened = {"preemptions": 0, "flushes": 0, "drafts": 0}
    preempt, step = core.scheduler._preempt_request, getattr(scheduler, "step", None)

    def count_preemption(*arguments: Any, **options: Any) -> None:
        happened["preemptions"] += 1
        preempt(*arguments, **options)

    def count_flush(output: Any) -> Any:
        orders = step(output)
        happened["flushes"] += len(orders.flush)
        happened["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return orders

    core.scheduler._preempt_request = count_preemption
    if scheduler is not None:
        scheduler.step = count_flush

    def abort(ids: list[int]) -> bool:
        sampling = SamplingParams(temperature=0, detokenize=False, max_tokens=4)
        llm.llm_engine.add_request("aborted", {"prompt_token_ids": ids}, sampling)

        def loads() -> bool:
            return any(hasattr(job, "match") for job in tier._jobs.values()) if tier else bool(scheduler._loads)

        while core.scheduler.has_requests() and not loads():
            llm.llm_engine.step()
        loading = loads()
        llm.llm_engine.abort_request(["aborted"])
        while core.scheduler.has_requests():
            llm.llm_engine.step()
        return loading

    def perform(order: dict[str, Any]) -> dict[str, Any]:
        if order["op"] == "generate":
            sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=order["max_tokens"])
            prompts: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in order["prompts"]]
            if "embeds" in order:
                noise, size = torch.Generator().manual_seed(order["embeds"]), model.get_hidden_size()
                prompts = [{"prompt_embeds": torch.randn(len(ids), size, generator=noise)} for ids in order["prompts"]]
            if "salt" in order:
                prompts = [{**one, "cache_salt": order["salt"]} for one in prompts]
            adapter = LoRARequest(*order["lora"]) if "lora" in order else None
            outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
            while core.scheduler.has_requests():  # as the loop of an engine process goes on after the last token
                llm.llm_engine.step()
            return {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "reasons": [output.outputs[0].finish_reason for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        if order["op"] == "forget":
            return {"done": llm.reset_prefix_cache()}
        if order["op"] == "offloaded":
            offloading.manager.primary_tier.reset_cache()
            return {"done": True}
        if order["op"] == "reset":
            return {"done": llm.reset_prefix_cache(reset_connector=True)}
        if order["op"] == "negate":
            for cache in core.model_executor.driver_worker.worker.model_runner.kv_caches:
                cache.neg_()
            return {"done": True}
        if order["op"] == "abort":
            return {"loading": abort(order["prompt"])}
        assert order["op"] == "check"
        if tier is not None and tier._lookups is not None:
            tier.check_integrity()
            idle = not (tier._jobs or tier._orphans or tier._lookups._requests or tier._lookups._finding)
            available = all(connector.available for connector in (tier._lookups._connector, *tier._groups))
            return {"served": True, "idle": idle, "available": available}
        if scheduler is None:
            return {"served": False}
        scheduler.check_integrity()
        idle = not (scheduler._requests or scheduler._loads or scheduler._leased)
        jobs = len(scheduler._jobs)
        return {"served": True, "idle": idle, "jobs": jobs, "available": scheduler.connector.available, **happened}

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(perform(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
