"""Processes with one vLLM engine in each, that do what lines of JSON say; see ORDERS, at the end.

    python vllm_child.py SOCKET

listens there. The first line of each connection has the engine's options: a fork, which need not import vLLM again,
makes that engine, and answers the lines that follow.

{"op": "generate", "prompts": [[...]], "max_tokens": 8} -> {"tokens": [[...]], "cached": [...]}
    "lora": [name, number, folder], "salt": "...", "embeds": a seed of random ones in place of the tokens,
    "images": [[seeds of those of each prompt]], "media_ids": [[their ids]]; also answers the tokens that were "drafted"
{"op": "abort", "prompt": [...]} -> {"loading": true}, if that request was being loaded when it was aborted
{"op": "hold", "folder": "..."}
    the copies to the cache say so with a file `held...` there, and never go on
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="WARNING",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # functions go to the processes of ranks
)


def ours(connector: Any) -> Any:
    """The connector that is ours: vLLM's, or one of those in its MultiConnector."""
    children = getattr(connector, "sub_connectors", [connector])
    return next((child for child in children if hasattr(child, "planner")), connector)


def worker_groups(worker: Any) -> list[Any]:
    """In the process of a rank: its connectors to the cache."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = ours(get_kv_transfer_group())
    return list(connector.worker._groups) if connector.worker is not None else []


def count(worker: Any) -> tuple[int, dict[str, int]]:
    """In the process of a rank: its number for the kernel, and what it has moved."""
    totals: dict[str, int] = {}
    for connector in worker_groups(worker):
        for name, value in connector.counters.items():
            totals[name] = totals.get(name, 0) + value
    return os.getpid(), totals


def is_available(worker: Any) -> bool:
    """In the process of a rank: whether it reaches the cache, by connections of its own."""
    return all(connector.available for connector in worker_groups(worker))


def hold(worker: Any, folder: str) -> None:
    """In the process of a rank: see above."""

    def held(*arguments: Any) -> int:
        (Path(folder) / f"held {os.getpid()}").touch()
        threading.Event().wait()
        return 0

    worker_groups(worker)[0]._own_mover().copier.copy_out = held  # rule: a copy of a real connector


def scale(worker: Any, factor: float = 1.3) -> bool:
    """In the process of a rank: update its weights in place, as a trainer does, through `.data`.

    Those of norms: the others are packed on a CPU, and what computes does not follow them.
    """
    for name, parameter in worker.model_runner.model.named_parameters():
        if "norm" in name:
            parameter.data.mul_(factor)
    return True


class Child:
    """The engine, with the orders that it takes as methods."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        from tiercache.connectors.vllm import worker

        worker.FLUSH_TIMEOUT_S = 60.0  # else a step of a busy machine gives up what it stores
        self.llm = LLM(**options)
        if self.llm.llm_engine.vllm_config.parallel_config.pipeline_parallel_size > 1:
            # Else later stages of an eager engine on a CPU have no buffers.
            self.llm.collective_rpc("execute_dummy_batch")
        self.core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.connector = connector = ours(self.core.scheduler.connector)
        self.offloading = getattr(connector, "connector_scheduler", None)
        self.tier = self.offloading.manager.secondary_tiers[0] if self.offloading is not None else None
        self.preemptions = 0
        self.drafted: list[int] = []
        self._count_what_happens()

    @property
    def scheduler(self) -> Any:
        """The scheduler's half of our connector; None without a cache."""
        return getattr(self.connector, "planner", None)

    def _count_what_happens(self) -> None:
        preempt, step = self.core.scheduler._preempt_request, getattr(self.scheduler, "step", None)

        def count_preemption(*arguments: Any, **options: Any) -> None:
            self.preemptions += 1
            preempt(*arguments, **options)

        def note_drafts(output: Any) -> Any:
            assert step is not None
            self.drafted += [token for ids in output.scheduled_spec_decode_tokens.values() for token in ids]
            return step(output)

        self.core.scheduler._preempt_request = count_preemption
        if self.scheduler is not None:
            self.scheduler.step = note_drafts

    def end(self) -> None:
        """Close the connectors, and end the processes of other ranks."""
        if self.llm.llm_engine.vllm_config.parallel_config.world_size > 1:
            self.llm.llm_engine.engine_core.shutdown()
            return
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.core.scheduler.shutdown()
        ensure_kv_transfer_shutdown()

    def _run_dry(self) -> None:
        """As the loop of an engine process goes on after the last token."""
        while self.core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def generate(self, order: dict[str, Any]) -> dict[str, Any]:
        import torch
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm_media import with_images

        self.drafted.clear()
        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=order["max_tokens"])
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        if "embeds" in order:
            noise = torch.Generator().manual_seed(order["embeds"])
            size = self.llm.llm_engine.vllm_config.model_config.get_hidden_size()
            prompts = [{"prompt_embeds": torch.randn(len(ids), size, generator=noise)} for ids in order["prompts"]]
        if "images" in order:
            prompts = with_images(prompts, order["images"], order.get("media_ids"))
        if "salt" in order:
            prompts = [{**one, "cache_salt": order["salt"]} for one in prompts]
        adapter = LoRARequest(*order["lora"]) if "lora" in order else None
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        self._run_dry()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "reasons": [output.outputs[0].finish_reason for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "drafted": self.drafted,
        }

    def forget(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"done": self.llm.reset_prefix_cache()}

    def offloaded(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.offloading is not None
        self.offloading.manager.primary_tier.reset_cache()
        return {"done": True}

    def reset(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"done": self.llm.reset_prefix_cache(reset_connector=True)}

    def sleep(self, order: dict[str, Any]) -> dict[str, Any]:
        self.llm.sleep(level=order["level"])
        if order.get("scale"):
            self.llm.collective_rpc(scale)
        self.llm.wake_up()
        return {"done": True}

    def _loads(self) -> bool:
        if self.tier is not None:
            from tiercache.connectors.vllm.tier import LoadJob

            return any(isinstance(job, LoadJob) for job in self.tier._jobs.values())
        assert self.scheduler is not None
        return bool(self.scheduler._loads)

    def abort(self, order: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, detokenize=False, max_tokens=4)
        self.llm.llm_engine.add_request("aborted", {"prompt_token_ids": order["prompt"]}, sampling)
        while self.core.scheduler.has_requests() and not self._loads():
            self.llm.llm_engine.step()
        loading = self._loads()
        self.llm.llm_engine.abort_request(["aborted"])
        self._run_dry()
        return {"loading": loading}

    def hold(self, order: dict[str, Any]) -> dict[str, Any]:
        self.llm.collective_rpc(hold, args=(order["folder"],))
        return {"done": True}

    def scale(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"done": all(self.llm.collective_rpc(scale))}

    def count(self, order: dict[str, Any]) -> dict[str, Any]:
        """The process of each rank, and what it has moved."""
        pids, counters = zip(*self.llm.collective_rpc(count), strict=True)
        return {"pids": pids, "counters": counters}

    def check(self, order: dict[str, Any]) -> dict[str, Any]:
        tier, scheduler = self.tier, self.scheduler
        if tier is not None and tier._lookups is not None:
            tier.check_integrity()
            idle = not (tier._jobs or tier.orphans or tier._lookups._requests or tier._lookups._finding)
            available = all(connector.available for connector in (tier._lookups.connector, *tier._groups))
            return {"idle": idle, "available": available}
        if scheduler is None:
            return {}
        scheduler.check_integrity()
        idle, jobs = not (scheduler._requests or scheduler._loads or scheduler._leased), len(scheduler.stores._jobs)
        available = scheduler.connector.available and all(self.llm.collective_rpc(is_available))
        steps = self.llm.llm_engine.vllm_config.max_concurrent_batches
        block_size = scheduler.connector.namespace.block_size
        counts = {"jobs": jobs, "steps": steps, "block_size": block_size, "preemptions": self.preemptions}
        return {"idle": idle, "available": available, **counts}


ORDERS: dict[str, Callable[[Child, dict[str, Any]], dict[str, Any]]] = {
    "generate": Child.generate,
    "forget": Child.forget,  # vLLM its own prefix cache
    "offloaded": Child.offloaded,  # vLLM forgets what it has offloaded itself
    "reset": Child.reset,  # as after an update of the weights: the connector's cache too
    "sleep": Child.sleep,  # and wakes up; with "scale" its weights are updated in between
    "abort": Child.abort,
    "hold": Child.hold,
    "scale": Child.scale,  # its weights are updated in place
    "count": Child.count,
    "check": Child.check,  # the scheduler's books, and its counts
}


def serve(connection: socket.socket) -> None:
    """Be the engine that the first line asks for."""
    lines, answers = connection.makefile("r"), connection.makefile("w")
    options = json.loads(lines.readline())
    with open(options.pop("log"), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    exec(options.pop("patch", ""))  # before there is an engine
    child = Child(options)
    print(json.dumps({"pid": os.getpid()}), file=answers, flush=True)
    for line in lines:
        order = json.loads(line)
        print(json.dumps(ORDERS[order["op"]](child, order)), file=answers, flush=True)
    child.end()
    sys.stdout.flush()
    os._exit(0)  # what Python would tear down takes seconds


def main() -> None:
    from vllm import LLM  # noqa: F401
    from vllm.lora.request import LoRARequest  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for engines that have ended
    print("ready", flush=True)
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            serve(connection)
            return
        connection.close()


if __name__ == "__main__":
    main()
