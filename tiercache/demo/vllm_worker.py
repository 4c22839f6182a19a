"""A vLLM process of `tiercache demo --engine vllm`, with the interface of `worker`: JSON lines on stdin and stdout.

It is started and observed only through vLLM's public interface.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from tiercache.client.client import Client

BLOCK_SIZE = 32
STEP_TOKENS = 512
NEW_TOKENS = 8
DRAIN_TIMEOUT_S = 60.0
POLL_S = 0.02
ENVIRONMENT = {
    # A single process, so that its end leaves nothing running.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment for starting this process: most is read before the first line here."""


class VllmWorker:
    """One vLLM with the connector. Uses its own prompt to check whether the cache can be reached."""

    def __init__(self, model: str, address: str, pool_bytes: int) -> None:
        import transformers
        from vllm import LLM

        self._address = address
        self._prompt_blocks = 0
        # vLLM would compute a float32 model in 16 bits, where a hit may give other tokens than a miss.
        dtype = str(getattr(transformers.AutoConfig.from_pretrained(model), "dtype", None) or "auto")
        self._llm = LLM(
            model,
            dtype=dtype.removeprefix("torch."),
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=pool_bytes,
            max_model_len=-1,
            max_num_batched_tokens=STEP_TOKENS,
            disable_log_stats=False,
            use_tqdm_on_load=False,
            kv_transfer_config={
                "kv_connector": "TierCacheConnector",
                "kv_connector_module_path": "tiercache.connectors.vllm_v1",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"address": address},
            },
        )
        # A whole step, so that no step of the prompt is the first of its size.
        room = self._llm.llm_engine.model_config.max_model_len - NEW_TOKENS
        self._warm_up = [number % 200 for number in range(min(STEP_TOKENS, room))]
        self._generate(self._warm_up)

    def _counts(self) -> tuple[int, int]:
        """Tokens found in the pool, and blocks loaded from the cache, so far."""
        counts = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        return int(counts["vllm:prefix_cache_hits"]), int(counts["vllm:tiercache_loaded_blocks"])

    def _generate(self, tokens: list[int]) -> dict[str, Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        self._prompt_blocks = len(tokens) // BLOCK_SIZE
        hits, loaded = self._counts()
        [output] = self._llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        hits_now, loaded_now = self._counts()
        return {
            "ttft_s": output.metrics.first_token_latency,
            "tokens": list(output.outputs[0].token_ids),
            "pool_tokens": hits_now - hits,
            # The last token of a prompt is computed even if the whole prompt was loaded.
            "cache_tokens": min((loaded_now - loaded) * BLOCK_SIZE, len(tokens) - 1),
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request: `generate`, `drain`, `forget` (the pool), `wait_for_cache`."""
        if request["do"] == "generate":
            return self._generate(request["tokens"])
        if request["do"] == "drain":
            return {"drained": self._drain()}
        if request["do"] == "forget":
            return {"done": self._llm.reset_prefix_cache()}
        if request["do"] == "wait_for_cache":
            return {"available": _wait_for(self._finds_its_prompt, request["timeout_s"])}
        raise ValueError(f"unknown request {request['do']!r}")

    def _drain(self) -> bool:
        with Client.connect(self._address, name="demo", map_arena=False) as client:

            def stored() -> bool:
                return bool(client.stats()["tiers"]["dram"]["blocks"] >= self._prompt_blocks)

            return _wait_for(stored, DRAIN_TIMEOUT_S)

    def _finds_its_prompt(self) -> bool:
        self._llm.reset_prefix_cache()
        return bool(self._generate(self._warm_up)["cache_tokens"])


def has_vllm() -> bool:
    """True if vLLM is installed: a plain folder of that name, which Python would import too, does not count."""
    found = find_spec("vllm")
    return found is not None and found.origin is not None


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return found


def main() -> int:
    """Answer until stdin ends. vLLM's output goes to stderr."""
    logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM logs before it has read its own setting
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model, address, pool_bytes = sys.argv[1:4]
    worker = VllmWorker(model, address, int(pool_bytes))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
