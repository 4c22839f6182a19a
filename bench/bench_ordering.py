"""The cost of an affinity query for the best order of documents, and its effect on the port and the daemon.

    .venv/bin/python bench/bench_ordering.py

64 documents of 1,000 tokens after a system prompt of 500, blocks of 16, by HTTP, for four contents of the cache. Prints
a table and, last, one line of JSON. Health checks and pings are compared within one run: alone, and beside two clients
that send the most expensive of these queries one after the other.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench_http import Port, url_in
from common import Report, percentile

import tiercache
from tiercache.connectors.vllm.names import block_hashes, hash_seed, keys_of
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import ModelCard

BLOCK = 16
SYSTEM, DOCUMENTS, DOCUMENT, QUESTION = 500, 64, 1000, 100
BLOCKS = (SYSTEM + DOCUMENTS * DOCUMENT + QUESTION) // BLOCK
SPEC = tiercache.NamespaceSpec(engine="bench/1", layout="x", dtype="uint8", block_size=BLOCK, block_bytes=4096)
HASHING = "sha256"
ROUNDS = 7
CHECKS = 150
START_S = 20.0


class Prompts:
    """The parts, and stores of them in some order."""

    def __init__(self, address: str) -> None:
        chosen = random.Random(1)
        self.documents = [[chosen.randrange(150_000) for _ in range(DOCUMENT)] for _ in range(DOCUMENTS)]
        self.system, self.question = list(range(SYSTEM)), list(range(QUESTION))
        self.order = chosen.sample(range(DOCUMENTS), DOCUMENTS)
        self._seed = hash_seed(HASHING)
        pool = tiercache.Pool.from_blocks(np.zeros((BLOCKS, SPEC.block_bytes), np.uint8))
        self.connector = tiercache.connect(address, namespace=SPEC, pool=pool, required=True)
        card = ModelCard(["m"], content_id("m"), [SPEC.fingerprint()], BLOCK, f"vllm/{HASHING}", BLOCK, self._seed)
        self.connector.announce([card])

    def body(self) -> bytes:
        segments = [self.system, {"unordered": self.documents}, self.question]
        return json.dumps({"model": "m", "salt": "", "segments": segments}).encode()

    def store(self, order: list[int], documents: int = DOCUMENTS) -> None:
        """A prompt that begins with so many of the documents in that order."""
        tokens = self.system + [token for number in order[:documents] for token in self.documents[number]]
        hashes = block_hashes(HASHING, self._seed, tokens, BLOCK)
        keys = keys_of(salted_root(content_id("m"), ""), hashes, 1, 0, len(hashes))
        self.connector.store(keys, range(len(hashes)))


def contents(prompts: Prompts) -> dict[str, Callable[[], None]]:
    """What is stored before each case, in turn."""

    def each_first() -> None:
        for number in range(DOCUMENTS):
            prompts.store([number, *(other for other in prompts.order if other != number)], 2)

    return {
        "nothing": lambda: None,
        "five": lambda: prompts.store(prompts.order, 5),
        "all": lambda: prompts.store(prompts.order),
        "each_first": each_first,
    }


def wait_known(port: Port, body: bytes) -> None:
    deadline_s = time.perf_counter() + START_S
    while True:
        try:
            port.ask("/v1/affinity", body)
            return
        except RuntimeError:
            if time.perf_counter() > deadline_s:
                raise
            time.sleep(0.05)


def beside(prompts: Prompts, port: Port) -> dict[str, list[float]]:
    """Health checks and pings of the daemon, in milliseconds."""
    took: dict[str, list[float]] = {"healthz": [], "ping": []}
    for _ in range(CHECKS):
        took["healthz"] += port.times_ms(1, "/healthz")
        took["ping"].append(prompts.connector.client.ping() * 1e3)
        time.sleep(0.01)
    return took


def main() -> None:
    """All contents, then the effect on others."""
    report = Report("bench_ordering")
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-") as folder:
        log = Path(folder) / "log"
        with tiercache.launch("256MiB", region="32MiB", http="127.0.0.1:0", log=log) as daemon:
            url = url_in(log)
            port, prompts = Port(url), Prompts(daemon.address)
            body = prompts.body()
            wait_known(port, body)
            for name, fill in contents(prompts).items():
                fill()
                answer = json.loads(port.ask("/v1/affinity", body))
                took = port.times_ms(ROUNDS, "/v1/affinity", body)
                label = f"stored: {name}, matched {answer['matched']:,}, complete {answer['complete']}"
                report.add(f"ordering_{name}_ms", label, statistics.median(took), "ms", samples=took)
            alone, over = beside(prompts, port), threading.Event()

            def ask() -> None:
                its = Port(url)
                while not over.is_set():
                    its.ask("/v1/affinity", body)

            askers = [threading.Thread(target=ask) for _ in range(2)]
            for asker in askers:
                asker.start()
            loaded = beside(prompts, port)
            over.set()
            for asker in askers:
                asker.join()
            for name in alone:
                for when, samples in (("alone", alone[name]), ("beside", loaded[name])):
                    report.add(
                        f"{name}_{when}_ms", f"{name} {when}, median", statistics.median(samples), "ms", samples=samples
                    )
                    report.add(f"{name}_{when}_p99_ms", f"{name} {when}, p99", percentile(samples, 0.99), "ms")
            prompts.connector.close()
    report.finish()


if __name__ == "__main__":
    main()
