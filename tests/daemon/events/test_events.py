"""KV events of a real daemon, read with ZeroMQ and msgpack alone, and as strictly as llm-d's KV indexer reads them."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgpack
import msgspec
import pytest
import zmq
from raw_client import VISIBLE, WAIT_S, Client, Daemon, daemon, new_chain, new_spec
from waiting import wait_until

from tiercache.daemon.events.events import Events, NamedBlocks
from tiercache.daemon.events.publisher import Publisher
from tiercache.protocol.messages import ReceivedRun

END = -1
Batch = tuple[int, list[dict[str, Any]]]
Hash = Annotated[int, msgspec.Meta(ge=-(1 << 63))] | Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class BlockStored(msgspec.Struct, tag_field="type", tag=True):
    """As llm-d-router decodes it (`pkg/kvevents`, September 2026): one bad event loses the batch."""

    block_hashes: list[Hash]
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    block_size: int
    parent_block_hash: Hash | None = None
    lora_id: Count | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: Count | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Count | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: Count | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag=True):
    pass


strictly = msgspec.msgpack.Decoder(
    tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], Count | None]
).decode


class Subscriber:
    """A SUB and a DEALER for what it missed; frames as vLLM's publisher sends them."""

    def __init__(self, folder: Path, topic: str = "") -> None:
        self._context = zmq.Context()
        self.topic = topic.encode()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, self.topic)
        self.sub.connect(f"ipc://{folder}/events")
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.connect(f"ipc://{folder}/replay")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def next(self) -> Batch:
        """The next batch that is published."""
        assert self.sub.poll(WAIT_S * 1000), "no batch"
        return self._batch(*self.sub.recv_multipart())

    def _batch(self, topic: bytes, number: bytes, payload: bytes) -> Batch:
        assert (topic, len(number)) == (self.topic, 8)
        strictly(payload)
        _, events, rank = msgpack.unpackb(payload)
        assert rank is None
        return int.from_bytes(number, "big"), events

    def replay(self, first: int) -> list[Batch]:
        """The replayed batches from `first` on."""
        self.dealer.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            assert self.dealer.poll(WAIT_S * 1000), "events do not stop coming"
            empty, topic, number, payload = self.dealer.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == END:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append(self._batch(topic, number, payload))

    def all(self) -> list[dict[str, Any]]:
        """Every event so far; what is said again until something is stored, once."""
        found = [event for _, events in self.replay(0) for event in events]
        return [event for place, event in enumerate(found) if event != CLEARED or found[place - 1 : place] != [CLEARED]]


@contextmanager
def subscriber(folder: Path, topic: str = "") -> Iterator[Subscriber]:
    one = Subscriber(folder, topic)
    try:
        yield one
    finally:
        one.close()


def flags(folder: Path, *more: str, arena: str = "8MiB") -> list[str]:
    addresses = ["--kv-events", f"ipc://{folder}/events", "--kv-events-replay", f"ipc://{folder}/replay"]
    return ["--arena", arena, "--region", "2MiB", *addresses, *more]


def store(
    client: Client, number: int, keys: bytes, hashes: Sequence[Any], parent: Any = None, parent_key: bytes = b""
) -> None:
    """Store blocks of four tokens; each token is its block's place in the chain."""
    tokens = struct.pack(f"<{4 * len(hashes)}I", *(place for place in range(len(hashes)) for _ in range(4)))
    said = [list(hashes), parent, tokens, 0, "full_attention", None, 7, "adapter"]
    tag, lease, states, _, parent_missing = client.ask("reserve", number, parent_key, keys, 10_000, said)
    assert (tag, parent_missing) == ("reserved", False)
    assert client.commit(lease, range(len(states))) == [VISIBLE] * len(hashes)


def stored(hashes: Sequence[Any], parent: Any = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [place for place in range(len(hashes)) for _ in range(4)],
        "block_size": 4,
        "lora_id": 7,
        "medium": "CPU",
        "lora_name": "adapter",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


@contextmanager
def connected(folder: Path) -> Iterator[Client]:
    """A client of a daemon that has its memory."""
    with Client(folder / "run") as client:
        client.await_arena()
        yield client


@contextmanager
def following(folder: Path, *more: str, topic: str = "", arena: str = "8MiB") -> Iterator[tuple[Client, Subscriber]]:
    """A daemon with events, a client of it and a subscriber."""
    running = daemon(folder / "run", *flags(folder, *more, arena=arena))
    with running, connected(folder) as client, subscriber(folder, topic) as sub:
        yield client, sub


CLEARED = {"type": "AllBlocksCleared"}


def join(sub: Subscriber, client: Client) -> range:
    """Store blocks of these names until a batch has come: a subscription takes its time."""
    names = itertools.count(first := 1 << 40)
    while not sub.sub.poll(20):
        store(client, client.namespace(), new_chain(1), [next(names)])
    return range(first, next(names))


def test_batches_come_in_order_and_can_be_had_again(tmp_path: Path) -> None:
    with following(tmp_path, "--kv-events-topic", "kv@pod@model", topic="kv@pod@model") as (client, sub):
        number, keys = client.namespace(), new_chain(4)
        joined = join(sub, client)
        store(client, number, keys[:32], [1, b"\x02" * 32])
        store(client, number, keys[32:], [3, (1 << 64) - 4], b"\x02" * 32, keys[16:32])
        store(client, number, new_chain(1), [5])
        first, events = sub.next()
        live: list[Batch] = [(first, events)]
        while [event.get("block_hashes") for event in live[-1][1]][-1:] != [[5]]:
            live.append(sub.next())
        assert [place for place, _ in live] == list(range(first, first + len(live)))
        events = [
            event for _, batch in live for event in batch if event != CLEARED and event["block_hashes"][0] not in joined
        ]
        names = [name for event in events for name in event["block_hashes"]]
        assert names == [1, b"\x02" * 32, 3, (1 << 64) - 4, 5]
        assert events[0]["parent_block_hash"] is None
        assert events[-1] == stored([5])
        everything = sub.replay(0)
        begin, events = everything[0]
        assert events == [CLEARED]
        assert [place for place, _ in everything] == list(range(begin, begin + len(everything)))
        assert everything[first - begin :][: len(live)] == live
        assert sub.replay(first + 1)[: len(live) - 1] == live[1:]
        for unknown in (1 << 60, (1 << 64) - 1):  # of another life, by a clock that was ahead
            assert sub.replay(unknown)[:3] == [(begin - 1, [CLEARED]), *everything[:2]]
        assert client.stats()["kv_events"]["batches"] >= len(everything)


def test_a_flush_and_the_end_leave_nothing(tmp_path: Path) -> None:
    with subscriber(tmp_path) as sub:
        with daemon(tmp_path / "run", *flags(tmp_path)), connected(tmp_path) as client:
            number, keys = client.namespace(), new_chain(3)
            store(client, number, keys, [1, 2, 3])
            assert client.ask("flush", "all", [], keys[16:32])[:2] == ["flushed", 2]
            assert client.ask("flush", "all", [number], b"")[:2] == ["flushed", 1]
            store(client, number, keys, [1, 2, 3])
            assert client.ask("flush", "all", [], b"")[:2] == ["flushed", 3]
            store(client, number, keys, [1, 2, 3])
            wait_until(lambda: len(sub.all()) >= 6)
            events = sub.all()
            gone = [name for event in events if event["type"] == "BlockRemoved" for name in event["block_hashes"]]
            assert sorted(gone) == [1, 2, 3]
            rest = [event for event in events if event["type"] != "BlockRemoved"]
            assert rest == [CLEARED, stored([1, 2, 3]), stored([1, 2, 3]), CLEARED, stored([1, 2, 3])]
            join(sub, client)
            last = sub.replay(0)[-1][0]
        number, events = sub.next()
        while number <= last or events[-1:] != [CLEARED]:
            number, events = sub.next()
        with daemon(tmp_path / "run", *flags(tmp_path)), connected(tmp_path) as client:
            assert sub.all() == [CLEARED]  # another life begins with nothing, and its numbers with a later time
            assert sub.replay(last)[0][0] > last
            store(client, client.namespace(), new_chain(1), [1])
            wait_until(lambda: sub.all() == [CLEARED, stored([1])])


def test_an_idle_daemon_is_heard_after_a_kill(tmp_path: Path) -> None:
    """By a subscriber that was there before, and by one that comes later."""
    with subscriber(tmp_path) as sub, subscriber(tmp_path) as late:
        running = Daemon(tmp_path / "run", *flags(tmp_path))
        with running.process, connected(tmp_path) as client:
            join(sub, client)
            running.process.kill()
        late.sub.disconnect(f"ipc://{tmp_path}/events")  # and connects when the daemon has long been there
        while sub.sub.poll(0):
            last, _ = sub.next()
        with daemon(tmp_path / "run", *flags(tmp_path)):
            for one in (sub, late):
                if one is late:
                    one.sub.connect(f"ipc://{tmp_path}/events")
                number, said = one.next()
                assert said == [CLEARED], "also to one who comes when nothing happens any more"
                begin, events = one.replay(last)[0]
                assert number >= begin > last
                assert events == [CLEARED]


def test_an_answer_that_has_lost_its_beginning_clears_first(tmp_path: Path) -> None:
    with following(tmp_path, "--kv-events-buffer", "2") as (client, sub):
        join(sub, client)
        while sub.next()[1]:
            """Until the empty batch that breaks a silence."""
        begin = sub.replay(0)[0][0]
        for name in range(3):
            store(client, client.namespace(), new_chain(1), [name])
            wait_until(lambda: sub.replay(0)[-1][1][-1:] == [stored([name])])  # noqa: B023
        (number, cleared), *rest = sub.replay(begin)
        assert (cleared, [place for place, _ in rest]) == ([CLEARED], [number + 1, number + 2])
        assert sub.replay(number + 1) == rest


def test_blocks_from_a_shared_store_are_in_events_once_a_client_names_them(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    shared = ["--shared", f"file://{tmp_path}/kv", "--shared-plain", "yes", "--shared-lookup-timeout", "1s"]
    spec, keys = new_spec(8192), new_chain(2)
    said = [[1, 2], None, struct.pack("<8I", 0, 0, 0, 0, 1, 1, 1, 1), 0, "full_attention"]
    with daemon(tmp_path / "run", *flags(tmp_path), *shared), connected(tmp_path) as client:
        store(client, client.ask("register_namespace", spec)[1], keys, [1, 2])
        wait_until(lambda: client.stats()["tiers"]["shared"]["written_blocks"] == 2, "the store has them")
    running = daemon(tmp_path / "run", *flags(tmp_path), *shared)
    with running, connected(tmp_path) as client, subscriber(tmp_path) as sub:
        number = client.ask("register_namespace", spec)[1]

        def loaded() -> bool:
            client.ask("match", [number], keys, 10_000, 0, True)
            return client.stats()["tiers"]["dram"]["blocks"] == 2

        wait_until(loaded, "they come up")
        assert sub.all() == [CLEARED]
        client.ask("reserve", number, b"", keys, 10_000, [*said, None, 7, "adapter"])
        wait_until(lambda: sub.all() == [CLEARED, stored([1, 2])], "they are named")


def test_blocks_are_told_of_in_each_tier(tmp_path: Path) -> None:
    nvme = ("--nvme", f"{tmp_path}/nvme", "--nvme-size", "16MiB", "--nvme-segment", "4MiB")
    with following(tmp_path, *nvme) as (client, sub):
        number, keys, on_disk = client.namespace(), new_chain(3), {**stored([1, 2, 3]), "medium": "STORAGE"}
        store(client, number, keys, [1, 2, 3])
        wait_until(lambda: sub.all() == [CLEARED, stored([1, 2, 3]), on_disk], "they are written")
        client.ask("flush", "dram", [], b"")
        wait_until(lambda: sum(event["type"] == "BlockRemoved" for event in sub.all()), "DRAM is empty")
        assert {event["medium"] for event in sub.all()[3:]} == {"CPU"}
        assert client.ask("prefetch", [number], keys)[2] == 3
        wait_until(lambda: sub.all()[-1] == stored([1, 2, 3]), "they are in both tiers")
        client.ask("flush", "all", [number], b"")
        wait_until(lambda: {"CPU", "STORAGE"} == {event["medium"] for event in sub.all()[5:]}, "all is flushed")


def test_a_daemon_of_a_node_connects_to_the_router(tmp_path: Path) -> None:
    """The router listens for daemons of nodes. It comes later than the daemon, and goes and comes again."""
    context, where = zmq.Context(), f"ipc://{tmp_path}/router"
    told = ["--arena", "4MiB", "--kv-events", where, "--kv-events-connect", "yes"]
    with daemon(tmp_path / "run", *told, "--kv-events-topic", "kv@node:w@m"), connected(tmp_path) as client:
        for life in range(2):
            router, numbers = context.socket(zmq.SUB), itertools.count(100 * life)
            router.setsockopt(zmq.SUBSCRIBE, b"kv@")
            router.bind(where)
            events: list[Any] = []
            while not events:
                store(client, client.namespace(), new_chain(1), [next(numbers)])
                while router.poll(20):
                    topic, _, payload = router.recv_multipart()
                    assert topic == b"kv@node:w@m"
                    events += strictly(payload)[1]
            router.close(0)
    context.term()


def test_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrong: list[tuple[list[Any], str]] = [
        ([[1], None, bytes(16)], "events name 1 blocks"),
        ([[1, 2], None, bytes(31)], "31 bytes of tokens"),
        ([[1, 2], None, bytes(32), 0, None, None, None, None, [None]], "1 extra keys"),
        ([[1.5, 2], None, bytes(32)], "Expected `int | bytes`"),
    ]
    with daemon(tmp_path / "run", *flags(tmp_path)), Client(tmp_path / "run") as client:
        for said, words in wrong:
            tag, _, text = client.ask("reserve", client.namespace(), b"", new_chain(2), 1000, said)
            assert (tag, words in text) == ("error", True), text
        # Text that is not UTF-8: subscribers could not read the batch that it is in.
        said = [[1], None, bytes(16), 0, None, None, None, None, [["XYZZY"]]]
        fields = [client.namespace(), b"", new_chain(1), 1000, said]
        packet = msgpack.packb(["reserve", *client.header(), *fields]).replace(b"\xa5XYZZY", b"\xa2\xff\xfe")
        reply, _ = client.exchange(packet)
        assert reply[0] == "error"
        assert "extra keys of events" in reply[-1]


def test_what_is_remembered_of_blocks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tenant and in all, and what has left makes room."""
    events = Events(Publisher("", "", "", 10))
    size = NamedBlocks(ReceivedRun([1], None, bytes(4)), 1)(0).size
    monkeypatch.setattr("tiercache.daemon.events.events.MAX_TENANT_BYTES", 2 * size)
    monkeypatch.setattr("tiercache.daemon.events.events.MAX_KNOWN_BYTES", 5 * size)

    def known(tenant: str, numbers: range) -> int:
        before = events.stats()["known_blocks"]
        for number in numbers:
            said = NamedBlocks(ReceivedRun([number], None, bytes(4)), 1, tenant)
            events.arrived(events.dram, 1, bytes([number]) * 16, said(0))
        assert events.check_integrity() == []
        return events.stats()["known_blocks"] - before

    assert known("a", range(3)) == 2
    assert known("b", range(10, 13)) == 2
    assert known("", range(20, 23)) == 1
    assert events.stats()["unnamed_blocks"] == 4
    events.left(events.dram, 1, bytes([0]) * 16)
    assert known("a", range(30, 32)) == 1
    events.cleared()
    assert events.known_bytes == 0
    assert known("a", range(3)) == 2
    events.close()


@pytest.mark.parametrize("extra", [5, "x", {"a": 1}, True, [{(): 1}], [{1: {2: "x"}}]])
def test_extra_keys_are_what_subscribers_of_vllm_can_read(extra: object) -> None:
    """Subscribers decode a batch with types: one bad field would lose them all blocks in it, of other clients too."""
    run = ReceivedRun([1], None, bytes(64), extra_keys=[msgspec.Raw(msgspec.msgpack.encode(extra))])
    if isinstance(extra, list):
        assert NamedBlocks(run, 16).check()
    else:
        with pytest.raises(msgspec.ValidationError):
            NamedBlocks(run, 16).check()


def test_what_is_said_of_one_block_is_limited(tmp_path: Path) -> None:
    """The block is cached all the same."""
    with daemon(tmp_path / "run", *flags(tmp_path)), connected(tmp_path) as client:
        number, keys = client.namespace(4096, block_size=20_000), new_chain(1)
        lease = client.ask("reserve", number, b"", keys, 10_000, [[1], None, bytes(80_000)])[1]
        assert client.commit(lease, [0]) == [VISIBLE]
        small = client.namespace(4096, block_size=4)
        leases = []
        for _ in range(40):  # half a mebibyte each, in stores that are never committed
            said = [[bytes(30_000)] * 16, None, bytes(16 * 16), 0, "full_attention"]
            leases.append(client.ask("reserve", small, b"", new_chain(16), 10_000, said)[1])
        its = client.stats()["kv_events"]
        assert its["known_blocks"] == 0
        assert its["unnamed_blocks"] == 1 + 16 * 6
