"""The daemon's KV events, decoded by vLLM's own classes, beside the events of vLLM's own publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request
from vllm_engines import BLOCK, PATIENCE_S, Engine, launch, offloading_config, prompt, stored_blocks, wait_until

import tiercache
from tiercache.connectors.vllm.events import CacheGroup, name_blocks, of_group
from tiercache.http.affinity import Affinity, Query
from tiercache.protocol.messages import unpack_indices

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Event = BlockStored | BlockRemoved | AllBlocksCleared
decode = msgspec.msgpack.Decoder(KVEventBatch).decode


@contextmanager
def replays(endpoint: str) -> Iterator[Callable[[], list[Event]]]:
    """All events so far, of any publisher that speaks vLLM's protocol."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)

    def events() -> list[Event]:
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        found: list[Event] = []
        while True:
            assert dealer.poll(PATIENCE_S * 1000), "events do not stop coming"
            _, _, number, payload = dealer.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return found
            found += decode(payload).events

    try:
        yield events
    finally:
        dealer.close(0)
        context.term()


class Subscriber:
    """One that listens, as vLLM documents it: a SUB, and a replay of what it sees by the numbers that it has missed.

    vLLM itself has publishers only.

    Attributes:
        batches: numbers and events, in the order in which it has handed them on.
        replayed: how many of them it had missed at first.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self.batches: list[tuple[int, KVEventBatch]] = []
        self.replayed = 0

    def _receive(self) -> tuple[int, bytes]:
        assert self._sub.poll(PATIENCE_S * 1000), "nothing comes"
        topic, number, payload = self._sub.recv_multipart()
        assert topic == self._topic
        return int.from_bytes(number, "big"), payload

    def lose(self) -> None:
        """Have the next batch lost on its way."""
        self._receive()

    def listen(self, until: Callable[[list[Event]], object]) -> None:
        """Take what comes until what has come is enough."""
        while not until(self.events()):
            number, payload = self._receive()
            if number > self._next():
                self._fill(number)
            if number == self._next():
                self.batches.append((number, decode(payload)))

    def events(self) -> list[Event]:
        return [event for _, batch in self.batches for event in batch.events]

    def _next(self) -> int:
        return self.batches[-1][0] + 1 if self.batches else 0

    def _fill(self, end: int) -> None:
        """Ask for what is missing before `end`."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart([b"", self._next().to_bytes(8, "big")])
            while self._next() < end:
                assert dealer.poll(PATIENCE_S * 1000), "no replay"
                _, topic, number, payload = dealer.recv_multipart()
                assert (topic, number) == (self._topic, self._next().to_bytes(8, "big"))
                self.batches.append((self._next(), decode(payload)))
                self.replayed += 1

    def close(self) -> None:
        self._sub.close(0)
        self._context.term()


def stored(events: list[Event], medium: str) -> dict[int, tuple[object, ...]]:
    """All that is said of each block that was stored."""
    said = {}
    for event in events:
        if isinstance(event, BlockStored) and event.medium == medium:
            size, parent = event.block_size, event.parent_block_hash
            extra = event.extra_keys or [None] * len(event.block_hashes)
            for place, name in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[place * size : (place + 1) * size])
                form = event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
                said[name] = parent, tokens, size, event.lora_id, event.lora_name, extra[place], *form
                parent = name
    return said


def removed(events: list[Event], medium: str) -> set[object]:
    found = [event for event in events if isinstance(event, BlockRemoved) and event.medium == medium]
    return {name for event in found for name in event.block_hashes}


def present(events: list[Event], medium: str) -> set[object]:
    """Blocks that one who has heard these events thinks are there."""
    there: set[object] = set()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            there.clear()
        elif event.medium == medium and isinstance(event, BlockStored):
            there.update(event.block_hashes)
        elif event.medium == medium:
            there.difference_update(event.block_hashes)
    return there


def leading_tokens(events: list[Event], prompts: list[list[int]]) -> list[int]:
    """What a router would expect to be found of each prompt: parents and tokens of what is in DRAM."""
    names = {said[:2]: name for name, said in stored(events, "CPU").items()}
    there, found = present(events, "CPU"), []
    for ids in prompts:
        end, name = 0, names.get((None, tuple(ids[:BLOCK])))
        while name is not None and name in there:
            end += BLOCK
            name = names.get((name, tuple(ids[end : end + BLOCK])))
        found.append(end)
    return found


def test_what_is_below_the_gpu_has_vllms_names(start: Callable[..., Engine], tmp_path: Path) -> None:
    """What the daemon says of a block is what vLLM has said of it, but for the medium."""
    ours, theirs = f"ipc://{tmp_path}/ours", f"ipc://{tmp_path}/theirs"
    (tmp_path / "disk").mkdir()
    with (
        launch(
            "64MiB",
            region="16MiB",
            kv_events=f"{ours}-pub",
            kv_events_replay=ours,
            nvme=str(tmp_path / "disk"),
            nvme_size="256MiB",
            nvme_segment="16MiB",
        ) as daemon,
        replays(ours) as below,
        replays(theirs) as above,
    ):
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"{theirs}-pub"}
        engine = start(daemon.address, kv_events_config={**events, "replay_endpoint": theirs})
        long = prompt(1000, "events")
        engine.generate([long, long[:500] + prompt(100, "other")], 40)
        blocks = 1039 // BLOCK + 639 // BLOCK - 500 // BLOCK
        wait_until(lambda: len(stored(below(), "STORAGE")) == blocks)
        said = below()
        assert isinstance(said[0], AllBlocksCleared)
        assert len(stored(above(), "GPU")) == blocks
        assert stored(said, "CPU") == stored(above(), "GPU")
        assert stored(said, "STORAGE") == stored(above(), "GPU")
        with tiercache.Client.connect(daemon.address) as client:
            client.flush(tier="dram")
        wait_until(lambda: removed(below(), "CPU") == set(stored(said, "CPU")))
        assert removed(below(), "STORAGE") == set()
        stores = sum(isinstance(event, BlockStored) for event in below())
        assert engine.regenerate([long], 1)[1] == [992]  # from NVMe, by way of DRAM
        wait_until(lambda: sum(isinstance(event, BlockStored) for event in below()) > stores)
        assert stored(below()[len(said) :], "CPU").items() <= stored(said, "CPU").items()
        with tiercache.Client.connect(daemon.address) as client:
            client.flush()
        wait_until(lambda: isinstance(below()[-1], AllBlocksCleared))


def test_chunks_of_vllms_own_offloading_have_its_names(start: Callable[..., Engine], tmp_path: Path) -> None:
    ours, theirs = f"ipc://{tmp_path}/ours", f"ipc://{tmp_path}/theirs"
    with (
        launch("64MiB", region="16MiB", kv_events=f"{ours}-pub", kv_events_replay=ours) as daemon,
        replays(ours) as below,
        replays(theirs) as above,
    ):
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"{theirs}-pub"}
        config = offloading_config({"address": str(daemon.address), "request_timeout_s": 5.0})
        engine = start(kv_transfer_config=config, kv_events_config={**events, "replay_endpoint": theirs})
        long = prompt(600, "offloaded")
        engine.generate([long], 40)
        engine.generate([long[:300] + prompt(100, "other")], 40)
        blocks = 600 // BLOCK + 400 // BLOCK - 300 // BLOCK  # vLLM offloads those of prompts
        wait_until(lambda: len(stored(below(), "CPU")) == blocks)
        assert stored(below(), "CPU").items() <= stored(above(), "GPU").items()


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("kind", ["text", "salted", "adapter", "images"])
def test_blocks_have_the_names_of_vllms_own_events(kind: str, per_block: int) -> None:
    size, hash_size = 16, 16 // per_block
    kv_cache_utils.init_none_hash(sha256)
    places = [PlaceholderRange(offset=offset, length=20) for offset in (3, 40, 75)]
    images = [MultiModalFeatureSpec(None, "image", f"image {place.offset}", place) for place in places]
    options = {
        "text": {},
        "salted": {"cache_salt": "secret"},
        "adapter": {"lora_request": LoRARequest("tuned", 7, "/path")},
        "images": {"mm_features": images},
    }[kind]
    hasher = kv_cache_utils.get_request_block_hasher(hash_size, sha256)
    request = Request("one", prompt(100), SamplingParams(), None, block_hasher=hasher, **options)
    pool = BlockPool(10, True, hash_size, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(6)
    named = []
    for first, end in ((0, 2), (2, 6)):
        pool.cache_full_blocks(request, blocks, first, end, size, kv_cache_group_id=0)
        run = name_blocks(request, first, end, per_block, size)
        run = of_group(run, CacheGroup(0, "full_attention", None), 0, end - first)
        named.append(
            BlockStored(
                run.hashes,
                run.parent,
                unpack_indices(run.tokens).tolist(),
                size,
                run.lora_id,
                "GPU",
                run.lora_name,
                run.extra_keys,
                run.group,
                run.kind,
                run.window,
            )
        )
    vllms = pool.take_events()
    assert len(vllms) == 2
    assert stored(named, "GPU").keys() == stored(vllms, "GPU").keys()
    for name, said in stored(named, "GPU").items():
        assert said[:7] == stored(vllms, "GPU")[name][:7]  # vLLM's event here has no kind
    assert (named[0].extra_keys is None) == (kind == "text")


def test_a_subscriber_keeps_up_while_vllm_stores_and_evicts(
    start: Callable[..., Engine], model: str, tmp_path: Path
) -> None:
    """From vLLM and from the daemon: every batch once and in order, also those that were lost on their way.

    The arena has room for 64 blocks of 84, and what a router makes of the events is what vLLM then finds.
    """
    ours, theirs = f"ipc://{tmp_path}/ours", f"ipc://{tmp_path}/theirs"
    with launch("4MiB", region="2MiB", kv_events=f"{ours}-pub", kv_events_replay=ours, kv_events_topic="kv") as daemon:
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"{theirs}-pub"}
        engine = start(daemon.address, kv_events_config={**events, "replay_endpoint": theirs, "topic": "kv"})
        below, above = Subscriber(f"{ours}-pub", ours, "kv"), Subscriber(f"{theirs}-pub", theirs, "kv")
        try:
            prompts = [prompt(200, f"live {number}") for number in range(12)]
            blocks = 0
            for number, ids in enumerate(prompts):
                engine.order_generate([ids], 30)
                engine.outputs()
                blocks += 229 // BLOCK
                for listener, medium in ((above, "GPU"), (below, "CPU")):
                    if number % 3 == 1:
                        listener.lose()
                    else:
                        listener.listen(lambda events: len(stored(events, medium)) == blocks)  # noqa: B023
                if number % 3 != 1:
                    assert stored(below.events(), "CPU") == stored(above.events(), "GPU")
            for listener in (below, above):
                numbers = [number for number, _ in listener.batches]
                assert numbers == list(range(len(numbers)))
                assert listener.replayed > 0

            below.listen(lambda events: len(present(events, "CPU")) == stored_blocks(daemon))
            assert stored_blocks(daemon) <= 64
            expected = leading_tokens(below.events(), prompts)
            assert (min(expected), max(expected)) == (0, 192)
            with tiercache.Client.connect(daemon.address, map_arena=False, request_timeout_s=5.0) as client:
                affinity = Affinity(client)
                asked = [affinity.ask(Query(model=model, tokens=ids, salt="")) for ids in prompts]
                assert [answer["matched_tokens"]["dram"] for answer in asked] == expected
                hit, miss = prompts[expected.index(192)], prompts[expected.index(0)]
                assert engine.regenerate([hit], 1)[1] == [192]
                assert engine.generate([miss], 1)[1] == [0]
                wait_until(lambda: engine.generate([[5, 6, 7]]) and engine.ask("check")["jobs"] == 0)
                client.flush()
            below.listen(lambda events: isinstance(events[-1], AllBlocksCleared))
            with replays(ours) as all_of_it:
                assert below.events() == all_of_it()
        finally:
            below.close()
            above.close()
