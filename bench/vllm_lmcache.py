"""LMCache's server and connector, for bench_vllm.py: vLLM with the cache most often used with it.

LMCache is no part of the project's environments. To have it measured, put it beside vLLM in one of its own:

    .venv-vllm/bin/python -m venv lmcache-venv
    echo $PWD/.venv-vllm/lib/python3.11/site-packages > lmcache-venv/lib/python3.11/site-packages/vllm.pth
    lmcache-venv/bin/pip install --no-deps lmcache==0.5.6 sortedcontainers
    PYTHONPATH=. lmcache-venv/bin/python bench/bench_vllm.py
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CONNECTOR = "LMCacheMPConnector"
CHUNK_TOKENS = 64
"""Of 32, 64, 256 (the default) and 512 the fastest where it divides the prompt, as it does in all cases here."""
START_TIMEOUT_S = 120.0


def absence() -> str:
    """Why LMCache cannot be measured; empty when it can."""
    return "" if importlib.util.find_spec("lmcache") else "lmcache is not installed: see bench/vllm_lmcache.py"


def mend_llvmlite() -> None:
    """Let vLLM start beside llvmlite, which LMCache imports.

    vLLM on a CPU looks into the `__dict__` of everything in every module; llvmlite's library answers that
    name, as any other, with a foreign function.
    """
    from llvmlite.binding import ffi

    found = ffi._lib_wrapper.__getattr__

    def find(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return found(library, name)

    ffi._lib_wrapper.__getattr__ = find


class LMCacheServer:
    """LMCache's multiprocess server with `gigabytes` of DRAM; blocks are copied by the engine, in shared memory."""

    def __init__(self, gigabytes: int, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        options = {
            "host": "127.0.0.1",
            "port": self.port,
            "l1-size-gb": gigabytes,
            "eviction-policy": "LRU",
            "chunk-size": CHUNK_TOKENS,
            "supported-transfer-mode": "engine_driven",
            "shm-name": f"bench{os.getpid()}",
        }
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--disable-observability"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        settings = {"LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **settings})
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.close()
                raise RuntimeError(f"LMCache's server does not answer:\n{log.read_text()[-3000:]}")
            threading.Event().wait(0.1)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def transfer(self) -> dict[str, Any]:
        """vLLM's configuration for LMCache."""
        where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}
        ways = {"lmcache.mp.mp_transfer_mode": "engine_driven", "lmcache.mp.save_decode_cache": True}
        return {"kv_connector": CONNECTOR, "kv_connector_extra_config": {**where, **ways}}

    def close(self) -> None:
        """SIGTERM, then SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
