"""The cases of `bench_worst.py`: each asks for the most that a client can."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

import msgspec
import zmq

from tiercache.client.client import Client
from tiercache.errors import RequestRefused
from tiercache.protocol import messages as m
from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec

MAX_NAMESPACES = m.MAX_NAMESPACES_PER_REQUEST
TTL_MS = 60_000
WRITTEN_S = 60.0
LONG = m.MAX_KEYS
Act = Callable[[], Any]


def spec(name: str, *, block_bytes: int = 4096, window: int = 0, tokens: int = 16) -> NamespaceSpec:
    """A namespace of the smallest blocks."""
    return NamespaceSpec(
        engine=f"bench/{name}",
        layout="bytes",
        dtype="uint8",
        block_size=tokens,
        block_bytes=block_bytes,
        window_blocks=window,
    )


class Bench:
    """A client of the daemon, and its stored blocks."""

    def __init__(self, address: str, blocks: int, rng: random.Random, settings: Mapping[str, str]) -> None:
        self.settings = settings
        self.address = address
        self.blocks = blocks
        self.rng = rng
        self.client = self.connect()
        self.main = self.client.register(spec("main"))
        self.long = b""  # the keys of the longest chain
        self._others: list[Client] = []

    def connect(self, *, mapped: bool = True) -> Client:
        """Open another session."""
        return Client.connect(self.address, name="worst", map_arena=mapped, request_timeout_s=60.0)

    def more(self, count: int, *, mapped: bool = True) -> list[Client]:
        """Open `count` further sessions; they end with `drop_others`."""
        self._others += [self.connect(mapped=mapped) for _ in range(count)]
        return self._others[-count:]

    def drop_others(self) -> None:
        for client in self._others:
            client.close()
        self._others.clear()

    def call(self, request: type[m.Request], client: Client | None = None, **fields: Any) -> Any:
        """Send a request; a refusal is a valid answer."""
        try:
            return (client or self.client).call(request, timeout_s=60.0, **fields)
        except RequestRefused as refusal:
            return refusal

    def keys(self, count: int) -> bytes:
        return self.rng.randbytes(16 * count)

    def fill(self) -> None:
        """Every frame a block: one longest chain, some long ones, many short ones."""
        self.long = self.keys(LONG)
        self.store(self.main, self.long)
        left = self.blocks - LONG
        while left > 512:
            length = self.rng.choice((1, 1, 4, 16, 64, 512, 4096))
            self.store(self.main, self.keys(min(length, left)))
            left -= min(length, left)
        self.store(self.main, self.keys(1024))

    def store(self, namespace: int, keys: bytes, parent: bytes = b"", commit: bool = True) -> list[int]:
        """A chain; returns the leases where it is not committed."""
        leases = []
        for start in range(0, len(keys), 16 * m.MAX_RESERVE):
            part = keys[start : start + 16 * m.MAX_RESERVE]
            reply = self.call(m.Reserve, namespace=namespace, parent=parent, keys=part, ttl_ms=TTL_MS)
            if not isinstance(reply, m.Reserved):
                break
            if commit and reply.lease:
                self.call(m.Commit, lease=reply.lease, blocks=m.pack_indices(list(range(len(part) // 16))))
            leases.append(reply.lease)
            parent = part[-16:]
        return leases

    def many(self, name: str, count: int = MAX_NAMESPACES, window: int = 0, block_bytes: int = 4096) -> list[int]:
        """So many namespaces."""
        specs = [spec(f"{name}/{number}", window=window, block_bytes=block_bytes) for number in range(count)]
        return [self.client.register(one) for one in specs]

    def stats(self) -> dict[str, Any]:
        return self.client.stats()

    def written(self) -> None:
        """Wait until all that is to be written is on NVMe."""
        deadline_s = time.monotonic() + WRITTEN_S
        while time.monotonic() < deadline_s:
            nvme = self.stats()["tiers"]["nvme"]
            if not nvme["write_queue_blocks"] + nvme["write_in_flight_bytes"]:
                return
            time.sleep(0.1)

    def blocks_left(self, least: int) -> bool:
        """Whether that many blocks are still there."""
        return cast(int, self.stats()["tiers"]["dram"]["blocks"]) >= least

    def settle(self, timeout_s: float) -> None:
        """Wait until deferred work is done: nothing waits to be freed, and counters stand still."""
        deadline_s, before = time.monotonic() + timeout_s, None
        while time.monotonic() < deadline_s:
            stats = self.stats()
            now = stats["tiers"]["dram"], stats["leases"], stats["arena"]["used_bytes"]
            if now == before:
                return
            before = now
            time.sleep(0.1)

    def run(self, act: Act, timeout_s: float) -> None:
        """Run a case, and wait until the work that it leaves behind is done."""
        act()
        self.settle(timeout_s)

    def check(self) -> list[str]:
        """The findings of the daemon's own check."""
        self.drop_others()
        self.settle(10.0)
        reply = self.call(m.Check, force=True)
        return cast("list[str]", reply.findings) if isinstance(reply, m.CheckReply) else []

    def close(self) -> None:
        self.drop_others()
        self.client.close()


class Case(NamedTuple):
    """`prepare` makes ready what is not measured, and returns what is. `needs`: a setting that has to be there."""

    name: str
    label: str
    prepare: Callable[[Bench], Act]
    least_blocks: int = 0
    needs: str = ""


# --- look-ups ---------------------------------------------------------------------------------------


def _match(namespaces: Callable[[Bench], list[int]], keys: Callable[[Bench], bytes], **fields: Any) -> Any:
    def prepare(bench: Bench) -> Act:
        numbers, its = namespaces(bench), keys(bench)

        def act() -> None:
            for _ in range(3):
                reply = bench.call(m.Match, namespaces=numbers, keys=its, **{"ttl_ms": TTL_MS, **fields})
                if isinstance(reply, m.Matched) and reply.lease:
                    bench.call(m.Release, lease=reply.lease)

        return act

    return prepare


def _main(bench: Bench) -> list[int]:
    return [bench.main]


def _long(bench: Bench) -> bytes:
    return bench.long


def _random(bench: Bench) -> bytes:
    return bench.keys(LONG)


def _zero_words(bench: Bench) -> bytes:
    return b"".join(bench.rng.randbytes(4) + bytes(4) + bench.rng.randbytes(8) for _ in range(LONG))


def _chains(bench: Bench) -> list[int]:
    """256 namespaces, each with the same chain of 300 blocks."""
    numbers = bench.many("chains")
    for number in numbers:
        bench.store(number, bench.long[: 16 * 300])
    return numbers


def _windows_with_one_block(bench: Bench) -> list[int]:
    numbers = bench.many("windows", window=1)
    for number in numbers:
        bench.store(number, bench.keys(1))
    return numbers


def _one_window(bench: Bench) -> list[int]:
    return _windows_with_one_block(bench)[:1]


def _thousand(bench: Bench) -> bytes:
    return bench.long[: 16 * 1024]


def _wide_windows(bench: Bench) -> list[int]:
    """32 namespaces with windows of 512 blocks, all there."""
    numbers = bench.many("wide", 32, window=512)
    for number in numbers:
        bench.store(number, bench.long[: 16 * 1024])
    return numbers


def _peek(namespaces: Callable[[Bench], list[int]], keys: Callable[[Bench], bytes]) -> Any:
    def prepare(bench: Bench) -> Act:
        numbers, its = namespaces(bench), keys(bench)
        return lambda: bench.call(m.Peek, namespaces=numbers, keys=its)

    return prepare


def _prefetch(bench: Bench) -> Act:
    numbers = _chains(bench)
    return lambda: bench.call(m.Prefetch, namespaces=numbers, keys=bench.long)


def _hint(bench: Bench) -> Act:
    numbers = [bench.main, *_chains(bench)[1:]]

    def act() -> None:
        bench.call(m.Hint, namespaces=numbers, keys=bench.long, return_in_ms=1000)
        bench.call(m.Hint, namespaces=[bench.main], keys=bench.long, ttl_ms=1)

    return act


def _pin_long(bench: Bench) -> Act:
    def act() -> None:
        bench.call(m.Pin, namespaces=[bench.main], keys=bench.long, ttl_ms=TTL_MS)
        bench.call(m.Unpin, namespaces=[bench.main], keys=bench.long)

    return act


def _many_pins(bench: Bench) -> Act:
    """As many pins as there can be, each on a chain of one block."""
    number = bench.client.register(spec("pins"))
    keys = [bench.keys(1) for _ in range(17_000)]
    for key in keys:
        bench.store(number, key)
        bench.call(m.Pin, namespaces=[number], keys=key, ttl_ms=TTL_MS)

    def act() -> None:
        for _ in range(3):
            bench.call(m.Pins)
            bench.stats()
        bench.call(m.Flush, tier="dram", namespaces=[number], key=b"")

    return act


# --- leases and stores --------------------------------------------------------------------------------


def _leases(bench: Bench, clients: int, **fields: Any) -> None:
    keys = bench.long[: 16 * 2000]
    for client in bench.more(clients):
        for count in range(1, 1025):
            part = keys[: 16 * (count + 900)]
            bench.call(m.Match, client, namespaces=[bench.main], keys=part, **{"ttl_ms": TTL_MS, **fields})


def _session_ends(bench: Bench) -> Act:
    _leases(bench, 16)
    return bench.drop_others


def _leases_expire(bench: Bench) -> Act:
    _leases(bench, 8, ttl_ms=1500)
    return lambda: time.sleep(2.5)


def _flush_below_leases(bench: Bench) -> Act:
    _leases(bench, 16)

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[bench.main], key=bench.long[:16])
        time.sleep(0.5)

    return act


def _pending_chain(bench: Bench) -> tuple[list[int], int]:
    """A long chain of which all but the first run is complete."""
    number = bench.client.register(spec("pending"))
    leases = bench.store(number, bench.keys(60_000), commit=False)
    for lease in leases[1:]:
        bench.call(m.Commit, lease=lease, blocks=m.pack_indices(list(range(m.MAX_RESERVE))))
    return leases, number


def _commit_releases_many(bench: Bench) -> Act:
    leases, _ = _pending_chain(bench)
    return lambda: bench.call(m.Commit, lease=leases[0], blocks=m.pack_indices(list(range(m.MAX_RESERVE))))


def _abort_drops_many(bench: Bench) -> Act:
    leases, _ = _pending_chain(bench)
    return lambda: bench.call(m.Abort, lease=leases[0], finished=True)


def _flush_drops_many(bench: Bench) -> Act:
    leases, number = _pending_chain(bench)

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[number], key=b"")
        bench.call(m.Abort, lease=leases[0], finished=True)

    return act


def _store_full(bench: Bench) -> Act:
    return lambda: [bench.store(bench.main, bench.keys(512)) for _ in range(100)]


def _store_other_size(bench: Bench) -> Act:
    number = bench.client.register(spec("large", block_bytes=1 << 20))
    return lambda: [bench.store(number, bench.keys(1)) for _ in range(200)]


def _flush_then_store_other_size(bench: Bench) -> Act:
    number = bench.client.register(spec("larger", block_bytes=2 << 20))

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[bench.main], key=b"")
        for _ in range(20):
            bench.store(number, bench.keys(1))

    return act


def _store_large_after_small(bench: Bench) -> Act:
    """As many small blocks as the window of new ones has, each a chain; then large ones push them out."""
    number = bench.client.register(spec("pushing", block_bytes=1 << 20))
    for _ in range(20_000):
        bench.store(bench.main, bench.keys(1))
    return lambda: [bench.store(number, bench.keys(16)) for _ in range(30)]


def _renew_wide(bench: Bench) -> Act:
    """All leases of a session, each on windows of 2048 blocks, after something was dropped."""
    number = bench.many("renewed", 1, window=2048)[0]
    bench.store(number, bench.long[: 16 * 2048])
    leases = []
    for _ in range(500):
        reply = bench.call(m.Match, namespaces=[number], keys=bench.long[: 16 * 2048], ttl_ms=TTL_MS)
        leases.append(reply.lease)

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[bench.main], key=bench.long[16 * 60_000 : 16 * 60_001])
        bench.call(m.Renew, leases=leases, ttl_ms=TTL_MS)
        for lease in leases:
            bench.call(m.Release, lease=lease)

    return act


def _set_quota(bench: Bench) -> Act:
    """Limits for very many tenants, beside very many namespaces."""
    bench.many("many", 3000)
    text = ",".join(f"tenant-{number}=1GiB" for number in range(1000))

    def act() -> None:
        bench.call(m.ChangeSetting, key="quota", value=text)
        bench.stats()
        bench.store(bench.main, bench.keys(512))
        bench.call(m.ChangeSetting, key="quota", value="")
        bench.call(m.Settings)

    return act


def _models(bench: Bench) -> Act:
    """Of as many sessions as there may be, each with as many models as it may have."""
    for number, client in enumerate(bench.more(50)):
        cards = [m.ModelCard([f"{number}-{card}-{'x' * 200}"], bytes(16), ["0" * 32], 16) for card in range(100)]
        bench.call(m.Report, client, registration="none", counters={}, models=cards)

    def act() -> None:
        for _ in range(3):
            bench.call(m.Models)
        bench.drop_others()

    return act


def _flush_then_match(bench: Bench) -> Act:
    numbers = [bench.main, *bench.many("chains")[1:]]

    def act() -> None:
        bench.call(m.Flush, tier="dram", namespaces=[bench.main], key=bench.long[16 * 60_000 : 16 * 60_001])
        for _ in range(10):
            bench.call(m.Match, namespaces=numbers[:1], keys=bench.long)
            bench.call(m.Match, namespaces=numbers, keys=bench.long)

    return act


def _flush_all(bench: Bench) -> Act:
    bench.many("many", 3000)
    return lambda: bench.call(m.Flush, tier="dram", namespaces=[], key=b"")


def _leases_of_one_session(bench: Bench) -> Act:
    client = bench.more(1)[0]
    for _ in range(50_000):
        bench.call(m.Match, client, namespaces=[bench.main], keys=bench.long[:16], ttl_ms=TTL_MS)
    return bench.drop_others


def _write_leases_end(bench: Bench) -> Act:
    # Without the arena: what mapped clients leave is in quarantine until this process ends.
    for client in bench.more(8, mapped=False):
        for _ in range(64):
            bench.call(m.Reserve, client, namespace=bench.main, parent=b"", keys=bench.keys(512), ttl_ms=TTL_MS)
    return bench.drop_others


def _unread(bench: Bench) -> Act:
    """As many answers as one process may leave unread, over many connections."""
    bench.store(bench.main, keys := bench.keys(1))
    sockets, requests = [], []
    for client in bench.more(40):
        lease = bench.call(m.Match, client, namespaces=[bench.main], keys=keys, ttl_ms=TTL_MS).lease
        session = client.session()
        for _ in range(8):
            sock = zmq.Context.instance().socket(zmq.DEALER)
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
                sock.set(option, value)
            sock.connect(f"ipc://{bench.address}/control.sock")
            sockets.append(sock)
            deadline_us = time.monotonic_ns() // 1000 + 60_000_000
            asked = m.Read(1, session.welcome.session, session.generation, deadline_us, lease, bench.main, 0, 0, 4096)
            requests.append(msgspec.msgpack.encode(asked))

    def act() -> None:
        for _ in range(60):
            for sock, request in zip(sockets, requests, strict=True):
                with suppress(zmq.Again):
                    sock.send(request, zmq.NOBLOCK)
            time.sleep(0.02)
        for sock in sockets:
            sock.close()
        bench.drop_others()

    return act


def _events(bench: Bench) -> Act:
    """Stores with as many tokens as a message holds; then all are forgotten."""
    tokens = 900
    number = bench.client.register(spec("events", tokens=tokens))
    short = bench.client.register(spec("short events"))

    def store(namespace: int, size: int) -> None:
        hashes: list[int | bytes] = [bench.rng.randbytes(32) for _ in range(512)]
        run = m.EventRun(hashes, None, bytes(4 * size * 512))
        keys = bench.keys(512)
        lease = bench.call(m.Reserve, namespace=namespace, parent=b"", keys=keys, ttl_ms=TTL_MS, events=run).lease
        bench.call(m.Commit, lease=lease, blocks=m.pack_indices(list(range(512))))

    for _ in range(200):
        store(short, 16)

    def act() -> None:
        for _ in range(30):
            store(number, tokens)
        time.sleep(0.3)
        bench.call(m.Flush, tier="all", namespaces=[], key=b"")

    return act


def _flush_each(bench: Bench) -> Act:
    """A block in each of very many namespaces."""
    for number in bench.many("many", 3000):
        bench.store(number, bench.keys(1))
    return lambda: bench.call(m.Flush, tier="all", namespaces=[], key=b"")


def _flush_key(bench: Bench) -> Act:
    """The first block of chains in very many namespaces."""
    keys = bench.keys(4)
    for number in bench.many("key", 1000):
        bench.store(number, keys)
    return lambda: bench.call(m.Flush, tier="all", namespaces=[], key=keys[:KEY_BYTES])


# --- the tier below -----------------------------------------------------------------------------------


def _match_new_chains(bench: Bench) -> Act:
    """Chains that are in DRAM alone: what is asked for again is offered for writing."""
    bench.written()
    numbers = bench.many(f"new {bench.rng.random()}")
    for number in numbers:
        bench.store(number, bench.long[: 16 * 300])
    bench.call(m.Flush, tier="nvme", namespaces=numbers, key=b"")

    def act() -> None:
        for _ in range(3):
            bench.call(m.Match, namespaces=numbers, keys=bench.long)

    return act


def _promote(window: int, blocks: int) -> Callable[[Bench], Act]:
    def prepare(bench: Bench) -> Act:
        number = bench.many(f"promoted {window}", 1, window=window)[0]
        keys = bench.keys(blocks)
        bench.store(number, keys)
        bench.written()
        bench.call(m.Flush, tier="dram", namespaces=[number], key=b"")

        def act() -> None:
            asked = {"namespaces": [number], "keys": keys, "ttl_ms": TTL_MS, "promote": True}
            leases = [bench.call(m.Match, **asked).lease for _ in range(16)]
            waiting = []
            for client in bench.more(16):
                lease = bench.call(m.Match, client, **asked).lease
                for _ in range(60):
                    wanted = {"lease": lease, "namespace": number, "first": blocks - 1, "count": 1}
                    waiting.append((client, client.session().post(m.Resolve, m.Frames, 30.0, **wanted)))
            for client, pending in waiting:
                with suppress(RequestRefused):
                    client.session().wait(pending)
            for lease in leases:
                bench.call(m.Release, lease=lease)

        return act

    return prepare


def _grants_end(bench: Bench) -> Act:
    """Places on NVMe that clients have reserved, when their sessions end."""
    granted = spec("granted")
    bench.client.expect(granted, direct=True)
    number = bench.client.register(granted)
    for client in bench.more(4):
        for _ in range(100):
            keys = bench.keys(128)
            bench.call(m.ReserveExtents, client, namespace=number, parent=b"", keys=keys, ttl_ms=TTL_MS)
    return bench.drop_others


# --- looks --------------------------------------------------------------------------------------------


def _stats(bench: Bench) -> Act:
    bench.many("many", 3000)
    for client in bench.more(40):
        counters = {f"counter_{number}": number for number in range(64)}
        bench.call(m.Report, client, registration="none", counters=counters)

    def act() -> None:
        for _ in range(3):
            bench.client.stats(histograms=True, hot_prefixes=1000)
        bench.drop_others()

    return act


def _inspect(bench: Bench) -> Act:
    return lambda: [
        bench.call(m.Inspect, namespaces=[], key=bench.long[-16:], chain=True),
        bench.call(m.Inspect, namespaces=[bench.main], key=bench.long[-16:], chain=True),
    ]


def _decode(bench: Bench) -> Act:
    """As many small values as fit into a message."""

    def act() -> None:
        bench.call(m.Renew, leases=[1] * 2_000_000, ttl_ms=1000)
        bench.call(m.Match, namespaces=[1] * 2_000_000, keys=bytes(16))
        bench.call(m.Flush, tier="dram", namespaces=[1] * 2_000_000, key=bytes(16))

    return act


def _check(bench: Bench) -> Act:
    return lambda: bench.call(m.Check, force=True)


FULL = 100_000
CASES = (
    Case("match_long", "match, 65536 keys, all there", _match(_main, _long), FULL),
    Case("match_miss", "match, 65536 keys, none there", _match(_main, _random), FULL),
    Case("match_zero_words", "match, 65536 keys with zero words", _match(_main, _zero_words), FULL),
    Case("match_256_chains", "match, 256 namespaces, 512 frames of each", _match(_chains, _long, resolve=512), FULL),
    Case("match_window", "match, 65536 keys, a window of 1", _match(_one_window, _random)),
    Case("match_256_windows", "match, 65536 keys, 256 windows of 1", _match(_windows_with_one_block, _random)),
    Case("peek_256_windows", "peek, 65536 keys, 256 windows of 1", _peek(_windows_with_one_block, _random)),
    Case("match_wide", "match and release, 32 windows of 512, all there", _match(_wide_windows, _thousand), FULL),
    Case("peek_256_chains", "peek, 256 namespaces", _peek(_chains, _long), FULL),
    Case("prefetch", "prefetch, 256 namespaces", _prefetch, FULL),
    Case("hint", "hint, 256 namespaces", _hint, FULL),
    Case("pin_long", "pin and unpin, 65536 keys", _pin_long, FULL),
    Case("pins", "stats, pins and a flush with 16384 pins", _many_pins, FULL),
    Case("session_ends", "16 sessions with 1024 leases each end", _session_ends, FULL),
    Case("leases_expire", "8192 leases expire within a moment", _leases_expire, FULL),
    Case("flush_below_leases", "flush a chain that 16384 leases hold", _flush_below_leases, FULL),
    Case("commit_releases_many", "commit a run that 60000 blocks wait for", _commit_releases_many, FULL),
    Case("abort_drops_many", "abort a run that 60000 blocks wait for", _abort_drops_many, FULL),
    Case("flush_drops_many", "flush a namespace with 60000 pending blocks", _flush_drops_many, FULL),
    Case("store_full", "reserve and commit 512 blocks, all full", _store_full, FULL),
    Case("store_other_size", "store blocks of another size, all full", _store_other_size, FULL),
    Case("store_large_after_small", "small new blocks, then large ones", _store_large_after_small, FULL),
    Case("write_leases_end", "8 sessions with 64 stores of 512 blocks each end", _write_leases_end, FULL),
    Case("unread", "4096 unread answers over 320 connections", _unread),
    Case("renew_wide", "renew 500 leases of 2048 pins after a drop", _renew_wide, FULL),
    Case("set_quota", "quotas of 1000 tenants, 3000 namespaces", _set_quota),
    Case("models", "5000 models of 50 sessions", _models),
    Case("flush_then_match", "flush a chain's end, then match 65536 keys", _flush_then_match, FULL),
    Case("flush_then_store", "flush everything, then store another size", _flush_then_store_other_size, FULL),
    Case("flush_all", "flush 3000 namespaces", _flush_all, FULL),
    Case("flush_each", "flush 3000 namespaces with a block each", _flush_each),
    Case("flush_key", "flush a key of 1000 namespaces", _flush_key),
    Case("stats", "stats with all lists full", _stats),
    Case("inspect", "inspect the end of 65536 blocks, its chain", _inspect, FULL),
    Case("decode", "messages of 2 million values", _decode),
    Case("check", "check the books", _check, FULL),
    Case("events", "stores of 460,000 tokens, then all forgotten", _events, needs="kv_events"),
    Case("many_leases", "a session with 50000 leases ends", _leases_of_one_session, FULL, "max_leases_per_session"),
    Case("match_new_chains", "match of 256 chains that NVMe lacks", _match_new_chains, FULL, "nvme"),
    Case("promote_chain", "16000 blocks come up for 32 leases, 960 wait", _promote(0, 16_000), FULL, "nvme"),
    Case("promote_window", "a window of 2048 comes up for 32 leases", _promote(2048, 2048), FULL, "nvme"),
    Case("grants_end", "400 stores past DRAM end with their sessions", _grants_end, 0, "nvme"),
)
