"""llm-d's KV indexer follows the events of a real daemon, and ends with what the daemon has."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from llm_d import Indexer
from raw_client import VISIBLE, WAIT_S, Client, daemon, new_chain
from waiting import wait_until

TOPIC = "kv@10.0.0.7:8000@Qwen3-8B"
MODEL = "Qwen3-8B"
SIZE = 4
BLOCK_BYTES = 256 << 10


class Subscription:
    """As llm-d's subscriber: asks for all batches when it connects, then for what it has missed."""

    def __init__(self, folder: Path, indexer: Indexer) -> None:
        self.indexer = indexer
        self.next = 0
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(f"ipc://{folder}/events")
        self._sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._folder = folder

    def replay(self) -> None:
        """A DEALER for each replay."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{self._folder}/replay")
        dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert dealer.poll(WAIT_S * 1000), "the replay does not end"
            frames = dealer.recv_multipart()
            topic, number, payload = frames[1:] if not frames[0] else frames
            if not payload:
                break
            self.next = self.next or int.from_bytes(number, "big")
            assert int.from_bytes(number, "big") == self.next, "a gap"
            self.indexer.receive(topic, number, payload)
            self.next += 1
        dealer.close(0)

    def take(self, wait_ms: int) -> None:
        """What has been published since, until nothing comes for so long."""
        while self._sub.poll(wait_ms):
            topic, number, payload = self._sub.recv_multipart()
            found = int.from_bytes(number, "big")
            if found > self.next:
                self.replay()
            if found == self.next:
                self.indexer.receive(topic, number, payload)
                self.next += 1

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def following(folder: Path) -> Iterator[tuple[Client, Subscription]]:
    flags = ["--arena", "4MiB", "--region", "2MiB", "--nvme", f"{folder}/nvme", "--nvme-size", "16MiB"]
    flags += ["--nvme-segment", "4MiB", "--kv-events", f"ipc://{folder}/events"]
    flags += ["--kv-events-replay", f"ipc://{folder}/replay", "--kv-events-topic", TOPIC]
    with daemon(folder / "run", *flags), Client(folder / "run") as client:
        client.await_arena()
        subscription = Subscription(folder, Indexer(SIZE))
        try:
            subscription.replay()
            yield client, subscription
        finally:
            subscription.close()


class Prompt:
    """A prompt with an engine's hashes of its blocks."""

    def __init__(self, number: int, blocks: int, hashes: list[Any]) -> None:
        self.tokens = [number * 1000 + at for at in range(blocks * SIZE)]
        self.keys = new_chain(blocks)
        self.hashes = hashes

    def store(self, client: Client, namespace: int) -> int:
        """Blocks that became visible."""
        said = [self.hashes, None, struct.pack(f"<{len(self.tokens)}I", *self.tokens), 0, "full_attention"]
        answer = client.ask("reserve", namespace, b"", self.keys, 10_000, said)
        if answer[0] != "reserved" or not answer[1]:
            return 0
        frames = [index for index, state in enumerate(answer[2]) if state == 2]
        return [*client.commit(answer[1], frames)].count(VISIBLE)


def in_the_daemon(client: Client, prompt: Prompt) -> list[set[str]]:
    """For each block the tiers that it is in, in llm-d's words."""
    names = {"dram": "cpu", "nvme": "storage"}
    keys = (prompt.keys[at : at + 16] for at in range(0, len(prompt.keys), 16))
    return [{names[view[1]] for view in client.ask("inspect", [], key)[1]} for key in keys]


def prompts() -> list[Prompt]:
    rng = random.Random(3)
    found = []
    for number in range(12):
        blocks = rng.randrange(6, 16)
        as_bytes = number % 2
        hashes = [rng.randbytes(32) if as_bytes else rng.getrandbits(64) | 1 << 63 for _ in range(blocks)]
        found.append(Prompt(number, blocks, hashes))
    return found


def test_the_indexer_ends_with_what_the_daemon_has(tmp_path: Path) -> None:
    """Stores that push earlier blocks to NVMe and from there out, loads from NVMe, flushes of a part and of all."""
    with following(tmp_path) as (client, subscription):
        namespace, asked = client.namespace(BLOCK_BYTES), prompts()
        seen: set[frozenset[str]] = set()

        def agrees() -> bool:
            subscription.take(wait_ms=20)
            known = [subscription.indexer.places(prompt.tokens, MODEL) for prompt in asked]
            seen.update(frozenset(tiers) for places in known for tiers in places)
            return known == [in_the_daemon(client, prompt) for prompt in asked]

        def stored(prompt: Prompt) -> bool:
            prompt.store(client, namespace)
            return all(in_the_daemon(client, prompt))

        for prompt in asked:
            wait_until(lambda prompt=prompt: stored(prompt), "there is room for it")  # type: ignore[misc]
            wait_until(agrees, "what is stored is known")
        assert {frozenset(), frozenset({"storage"}), frozenset({"cpu", "storage"})} <= seen
        last = asked[-1]

        def is_written() -> bool:
            """What found no room, or lost its parent before it was written, is written when it is asked for again."""
            last.store(client, namespace)
            client.ask("match", [namespace], last.keys, 0, 0)
            return all("storage" in tiers for tiers in in_the_daemon(client, last))

        wait_until(is_written, "the last prompt is written")
        client.ask("flush", "dram", [], b"")
        wait_until(agrees, "DRAM is empty")
        assert client.ask("prefetch", [namespace], last.keys)[2] == len(last.hashes)
        wait_until(lambda: client.ask("peek", [namespace], last.keys)[2] == 0, "they are read into DRAM")
        wait_until(agrees, "they are in both tiers")
        client.ask("flush", "all", [], last.keys[3 * 16 : 4 * 16])
        wait_until(agrees, "the end of a prompt is flushed")
        assert list(map(bool, in_the_daemon(client, last))) == [number < 3 for number in range(len(last.hashes))]
        client.ask("flush", "all", [], b"")
        wait_until(agrees, "all is flushed")
        assert not any(subscription.indexer.tiers.values())
        last.store(client, namespace)
        wait_until(agrees, "the first blocks after that are known")


def test_a_daemon_of_a_node_connects_to_the_router(tmp_path: Path) -> None:
    """The router listens for daemons of nodes. It comes later than the daemon, and goes and comes again."""
    context, where = zmq.Context(), f"ipc://{tmp_path}/router"
    flags = ["--arena", "4MiB", "--kv-events", where, "--kv-events-connect", "yes"]
    flags += ["--kv-events-topic", "kv@node:worker-3@Qwen3-8B"]
    with daemon(tmp_path / "run", *flags), Client(tmp_path / "run") as client:
        client.await_arena()
        for life in range(2):
            router, indexer = context.socket(zmq.SUB), Indexer(SIZE)
            router.setsockopt(zmq.SUBSCRIBE, b"kv@")
            router.bind(where)
            numbers = itertools.count(100 * life)
            while not indexer.tiers:
                prompt = Prompt(number := next(numbers), 1, [1 << 63 | number])
                assert prompt.store(client, client.namespace()) == 1
                while router.poll(20):
                    indexer.receive(*router.recv_multipart())
            assert {place for places in indexer.tiers.values() for place in places} == {("node:worker-3", "cpu")}
            router.close(0)
    context.term()
