"""The processes of `bench_nvme.py` that store, load and ping, and the orders to them."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, SEED

import tiercache

DEADLINE_S = 60.0
POLL_S = 0.008
PING_PAUSE_S = 0.001
COPY_BLOCKS = 64
ASKED_OFTEN = 100


class Worker:
    """One client: a pool as large as a round's data, and the steps of a round.

    The blocks are `chains` chains of equal length, which begin with the same `head` blocks and differ from there on.
    """

    def __init__(self, block_bytes: int, blocks: int, address: str, chains: int, head: int = 0) -> None:
        assert (blocks - head) % chains == 0
        self._head = head
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._chains = chains
        self._random = random.Random(SEED + os.getpid())
        self._pool = np.frombuffer(self._random.randbytes(block_bytes * 8), np.uint8)
        self._pool = np.tile(self._pool.reshape(8, block_bytes), (blocks // 8, 1))
        spec = tiercache.NamespaceSpec(
            engine="bench", layout="bytes", dtype="uint8", block_size=16, block_bytes=block_bytes
        )
        self._connector = tiercache.connect(
            address,
            namespace=spec,
            pool=tiercache.Pool.from_blocks(self._pool),
            name="bench",
            required=True,
            request_timeout_s=DEADLINE_S,
            load_timeout_s=DEADLINE_S,
        )
        self.polls = 0
        """Requests for statistics: this benchmark's own, which cost the daemon's loop as much as many blocks do."""
        self._keys = b""
        self._stamp = 0
        self._ids = list(range(blocks))
        self._random.shuffle(self._ids)
        self._await_mapping()

    def _await_mapping(self) -> None:
        """Wait until this process has faulted in its mapping of the arena."""
        while any(thread.name == "tiercache-populate" for thread in threading.enumerate()):
            time.sleep(0.01)

    def _nvme(self) -> dict[str, Any]:
        self.polls += 1
        stats: dict[str, Any] = self._connector.client.stats()["tiers"]["nvme"]
        return stats

    def _stamps(self) -> np.ndarray[Any, Any]:
        """The first and last word of each block, in the order of the chain."""
        words = self._pool.view(np.uint64)
        return words[self._ids][:, [0, -1]]

    def renew(self) -> dict[str, float]:
        """New content under new keys."""
        self._stamp = self._random.randrange(1, 1 << 62)
        words = self._pool.view(np.uint64)
        for number, block in enumerate(self._ids):
            words[block, 0] = words[block, -1] = self._stamp + number
        self._keys = self._random.randbytes(16 * self._blocks)
        return {}

    def _each_chain(self) -> Iterator[tuple[bytes, list[int]]]:
        """Keys and pool blocks of each chain."""
        head, blocks = self._head, (self._blocks - self._head) // self._chains
        for first in range(head, self._blocks, blocks):
            own = slice(first, first + blocks)
            keys = self._keys[: 16 * head] + self._keys[16 * own.start : 16 * own.stop]
            yield keys, self._ids[:head] + self._ids[own]

    def store(self) -> dict[str, float]:
        """Store all blocks; returns when they are in DRAM."""
        for keys, ids in self._each_chain():
            result = self._connector.store(keys, ids)
            if result.stored + result.present != len(ids):
                raise RuntimeError(f"{result} of {len(ids)} blocks")
        return {}

    def write(self) -> dict[str, float]:
        """Store all blocks, and wait until they are on the disk."""
        before = _first_copies(self._nvme())
        start = time.perf_counter()
        cpu = time.process_time()
        self.store()
        stored_s = time.perf_counter() - start
        end = start + DEADLINE_S
        while (done := _first_copies(stats := self._nvme()) - before) < self._blocks or stats["write_in_flight_bytes"]:
            idle = stats["write_queue_blocks"] == 0 and stats["write_in_flight_bytes"] == 0
            if time.perf_counter() > end or (idle and _first_copies(self._nvme()) < before + self._blocks):
                raise RuntimeError(f"not all blocks were written: {stats}")
            # Half of the time that the rest will take: each question costs the daemon as much as some blocks.
            left_s = (time.perf_counter() - start) * (self._blocks - done) / max(1, done)
            time.sleep(min(max(POLL_S, left_s / 2), 1.0))
        return {
            "seconds": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu,
            "stored_s": stored_s,
        }

    def forget_dram(self) -> dict[str, float]:
        """Flush DRAM; returns when it has room for everything: a promotion that finds no frame to be had ends there."""
        self._connector.flush(tier="dram")
        end = time.perf_counter() + DEADLINE_S
        while (dram := self._connector.client.stats()["tiers"]["dram"])["capacity_bytes"] - dram["bytes"] < (
            self._blocks * self._block_bytes
        ):
            if time.perf_counter() > end:
                raise RuntimeError(f"frames did not come free: {dram}")
            time.sleep(POLL_S)
        return {}

    def read(self) -> dict[str, float]:
        """Load everything back, which DRAM has forgotten; every block is compared (outside of the timing)."""
        self._pool.view(np.uint64)[:, [0, -1]] = 0
        before = self._nvme()
        start, cpu = time.perf_counter(), time.process_time()
        chains = list(self._each_chain())
        for keys, _ in chains[1:]:  # as several requests at once: all directories are busy
            self._connector.prefetch(keys)
        good = 0
        for keys, ids in chains:
            good += self._connector.load(self._connector.match(keys), ids, timeout_s=DEADLINE_S)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if good != self._blocks + self._head * (self._chains - 1):
            raise RuntimeError(f"{good} of {self._blocks} blocks loaded: {self._nvme()}")
        wanted = self._stamp + np.arange(self._blocks, dtype=np.uint64)
        if not (self._stamps() == wanted[:, None]).all():
            raise RuntimeError("blocks hold other bytes than were stored")
        after = self._nvme()
        if after["promoted_blocks"] - before["promoted_blocks"] != self._blocks:
            raise RuntimeError("blocks came from elsewhere than the disk")
        rewritten = after["written_bytes"] - before["written_bytes"]
        rewritten += after["write_in_flight_bytes"] + after["write_queue_blocks"] * self._block_bytes
        return {"seconds": seconds, "cpu_s": cpu, "rewritten": float(rewritten)}

    def fill(self) -> dict[str, float]:
        """Store short chains with one head until each directory was given twice its room; how many are still found."""
        nvme, keys, rng = self._nvme(), list[bytes](), self._random
        head = rng.randbytes(16 * self._head)
        own = (self._blocks - self._head) // self._chains
        while self._nvme()["written_bytes"] < nvme["written_bytes"] + 2 * nvme["capacity_bytes"]:
            for _ in range(self._chains):
                keys.append(head + rng.randbytes(16 * own))
                self._connector.store(keys[-1], self._ids[: self._head + own])
            end = time.perf_counter() + DEADLINE_S
            while (stats := self._nvme())["write_queue_blocks"] or stats["write_in_flight_bytes"]:
                if time.perf_counter() > end:
                    raise RuntimeError(f"blocks were not written: {stats}")
                time.sleep(POLL_S)
        self.forget_dram()
        found = 0
        for chain in keys:
            match = self._connector.match(chain)
            found += match.blocks == self._head + own
            self._connector.release(match)
        stats = self._nvme()
        return {"found": found, "stored": len(keys), "copied": stats["head_copied_bytes"] / stats["written_bytes"]}

    def ask_often(self) -> dict[str, float]:
        """Nothing but requests for statistics."""
        cpu = time.process_time()
        for _ in range(ASKED_OFTEN):
            self._nvme()
        return {"cpu_s": time.process_time() - cpu}

    def prefetch(self) -> dict[str, float]:
        """Promote everything from the disk without copying it to the pool."""
        self.forget_dram()
        before = self._nvme()["promoted_blocks"]
        start = time.perf_counter()
        for keys, _ in self._each_chain():
            self._connector.prefetch(keys)
        while self._nvme()["promoted_blocks"] < before + self._blocks:
            if time.perf_counter() > start + DEADLINE_S:
                raise RuntimeError(f"not all blocks came up: {self._nvme()}")
            time.sleep(10 * POLL_S)
        return {"seconds": time.perf_counter() - start}

    def copy(self) -> dict[str, float]:
        """The CPU time of copying a round's data once, as loads and stores do."""
        other = np.ones((64, self._block_bytes), np.uint8)
        cpu = time.process_time()
        for number, block in enumerate(self._ids):
            np.copyto(other[number % 64], self._pool[block])
        return {"cpu_s": time.process_time() - cpu}

    def again(self) -> dict[str, float]:
        """Load from DRAM repeatedly until another line comes."""
        self.renew()
        self.store()
        print("copying", flush=True)
        loads = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            for keys, ids in self._each_chain():
                loads += self._connector.load(self._connector.match(keys), ids) == len(ids)
        return {"loads": loads}

    def forget(self) -> dict[str, float]:
        """Forget everything in all tiers; returns when the slots are free again."""
        self._connector.flush()
        end = time.perf_counter() + DEADLINE_S
        while self._nvme()["bytes"]:
            if time.perf_counter() > end:
                raise RuntimeError(f"slots did not come free: {self._nvme()}")
            time.sleep(POLL_S)
        return {}

    def close(self) -> None:
        """Say good-bye."""
        self._connector.close()


def _first_copies(stats: dict[str, Any]) -> int:
    """Blocks that were written, copies of heads in a further directory aside."""
    return int(stats["written_blocks"] - stats["head_copied_blocks"])


class Pinger:
    """Pings the daemon that is measured and an idle one, every millisecond or so, until another line comes."""

    def __init__(self, address: str, idle: str) -> None:
        from tiercache.client.client import Client

        self.polls = 0
        self._clients = {
            name: Client.connect(where, name="ping", map_arena=False, request_timeout_s=10.0)
            for name, where in (("busy", address), ("idle", idle))
        }

    def ping(self) -> dict[str, Any]:
        """Round trips in ms."""
        trips: dict[str, list[float]] = {name: [] for name in self._clients}
        turns = itertools.cycle(self._clients.items())
        while not select.select([sys.stdin], [], [], PING_PAUSE_S)[0]:
            name, client = next(turns)
            trips[name].append(client.ping() * 1000)
        return trips

    def close(self) -> None:
        """Say good-bye."""
        for client in self._clients.values():
            client.close()


def child_main(argument: str) -> None:
    """A child: one step for each line of input, one line of JSON for each step."""
    order = json.loads(argument)
    worker: Worker | Pinger
    if order["kind"] == "ping":
        worker = Pinger(order["address"], order["idle"])
    else:
        worker = Worker(order["block_bytes"], order["blocks"], order["address"], order["chains"], order["head"])
    print("{}", flush=True)
    while line := sys.stdin.readline().strip():
        if line != "stop":
            before = worker.polls
            answer = getattr(worker, line)()
            print(json.dumps(answer if line == "ping" else {**answer, "polls": worker.polls - before}), flush=True)
    worker.close()


# --- the side of the process that keeps the books --------------------------------------------------


class Child:
    """A process that takes orders. Waits for its first answer."""

    def __init__(
        self,
        kind: str,
        address: str,
        block_bytes: int = 0,
        blocks: int = 0,
        idle: str = "",
        chains: int = 1,
        head: int = 0,
    ) -> None:
        sizes = {"block_bytes": block_bytes, "blocks": blocks, "chains": chains, "head": head}
        order = json.dumps({"kind": kind, "address": address, "idle": idle, **sizes})
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, order],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid
        self.hear()

    def say(self, word: str) -> None:
        """Begin a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def line(self) -> str:
        """The next line that the child prints."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline().strip()
        if not text:
            raise RuntimeError("a process of the benchmark has failed")
        return text

    def hear(self) -> dict[str, Any]:
        """The answer to the last step."""
        answer: dict[str, Any] = json.loads(self.line())
        return answer

    def ask(self, word: str) -> dict[str, Any]:
        """Do one step; returns its answer."""
        self.say(word)
        return self.hear()

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    child_main(sys.argv[1])
