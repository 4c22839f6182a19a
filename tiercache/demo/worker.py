"""An engine process of the demo: one JSON request per line on stdin, one answer per line on stdout."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import transformers

from tiercache.connector.connector import Connector
from tiercache.engine import CacheLike, Engine, EngineSettings, SamplingParams, connect_to
from tiercache.errors import TierCacheError
from tiercache.protocol.namespaces import NamespaceSpec

WARM_UP_TOKENS = 64
NEW_TOKENS = 8


class EngineWorker:
    """One engine with its connector."""

    def __init__(self, model: str, address: str, pool_bytes: int) -> None:
        self.connectors: list[CacheLike] = []

        def connect(namespace: NamespaceSpec, pool: torch.Tensor) -> CacheLike:
            self.connectors.append(connect_to(address, name="demo engine")(namespace, pool))
            return self.connectors[-1]

        self.engine = Engine(model, EngineSettings(kv_cache_memory=pool_bytes), connect)
        # Weights, allocator and threads of a fresh process are warmed up with other tokens.
        self._generate(list(range(WARM_UP_TOKENS)))
        self.engine.drain()

    def _generate(self, tokens: list[int]) -> dict[str, Any]:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        [output] = self.engine.generate([tokens], params)
        return {
            "ttft_s": output.ttft_s,
            "tokens": output.tokens,
            "pool_tokens": output.pool_hit_tokens,
            "cache_tokens": output.external_hit_tokens,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request: `generate`, `drain`, `forget` (the pool), `wait_for_cache`."""
        if request["do"] == "generate":
            return self._generate(request["tokens"])
        if request["do"] == "drain":
            return {"drained": self.engine.drain()}
        if request["do"] == "forget":
            self.engine.reset_pool()
            return {}
        if request["do"] == "wait_for_cache":
            return {"available": self._wait_for_cache(request["timeout_s"])}
        raise ValueError(f"unknown request {request['do']!r}")

    def _wait_for_cache(self, timeout_s: float) -> bool:
        connector = self.connectors[0]
        assert isinstance(connector, Connector)
        deadline_s = time.monotonic() + timeout_s
        while not connector.available and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return connector.available


def main() -> int:
    """Answer until stdin ends. A failure is one line on stderr."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model, address, pool_bytes = sys.argv[1:4]
    try:
        worker = EngineWorker(model, address, int(pool_bytes))
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(worker.answer(json.loads(line))), flush=True)
        worker.engine.close()
    except TierCacheError as error:
        print(f"tiercache demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
