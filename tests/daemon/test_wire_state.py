"""The wire protocol without a line of tiercache: pins, flushes, peeks, statistics and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from raw_client import (
    FRAME,
    NONE,
    VISIBLE,
    Client,
    block_of,
    daemon,
    new_chain,
    new_spec,
)
from waiting import wait_until

from tiercache.daemon.cache import FLUSHED_AT_ONCE


def test_pins_end_with_their_unpin(client: Client) -> None:
    number, keys = client.namespace(), new_chain(3)
    client.store(number, keys[:32], [block_of(0), block_of(1)])
    assert client.ask("pin", [number], keys, 60_000) == ["pinned", 2]
    assert client.stats()["pins"] == {"count": 1, "bytes": 2 * 8192}
    assert client.ask("pin", [number], keys, 60_000) == ["pinned", 2]
    assert client.stats()["pins"]["count"] == 1
    assert client.ask("unpin", [number], keys) == ["pinned", 2]
    assert client.ask("unpin", [number], keys) == ["pinned", 0]
    assert client.stats()["pins"] == {"count": 0, "bytes": 0}
    assert client.ask("prefetch", [number], keys) == ["matched", 2, 0, 0, [], False, 0]


def test_a_flush_by_key_goes_on_behind_the_answer(client: Client) -> None:
    number, keys = client.namespace(4096), new_chain(2600)
    parent = b""
    for first in range(0, 2600, 512):
        part = keys[first * 16 : (first + 512) * 16]
        lease, states, _, missing = client.reserve(number, part, parent)
        assert (set(states), missing) == ({FRAME}, False)
        assert set(client.commit(lease, range(len(states)))) == {VISIBLE}
        parent = part[-16:]
    _, lease, _ = client.match([number], keys)
    tag, blocks, more = client.ask("flush", "dram", [number], keys[10 * 16 : 11 * 16])
    assert (tag, more) == ("flushed", True)
    assert 0 < blocks < 2590
    assert client.length(number, keys) == 10
    assert not client.release(lease)

    def table() -> Any:
        return next(space for space in client.stats()["namespaces"] if space["id"] == number)

    wait_until(lambda: table()["blocks"] == 10)
    assert client.ask("flush", "all", [number], b"")[:2] == ["flushed", 10]
    assert client.length(number, keys) == 0
    assert client.reserve(number, keys[:16])[1] == [FRAME]


def test_a_peek_finds_what_a_match_would(client: Client) -> None:
    numbers, keys = [client.namespace(), client.namespace()], new_chain(5)
    for number, stored in zip(numbers, (4, 2), strict=True):
        client.store(number, keys[: stored * 16], [block_of(place) for place in range(stored)])
    before = client.stats()["counters"]
    assert client.ask("peek", numbers, keys) == ["peeked", 2, 0, [[4, 0], [2, 0]], 0, [0, 0]]
    assert client.stats()["counters"] == {**before, "requests": before["requests"] + 2}
    assert client.refusal("peek", [], keys) == "bad_value"
    assert client.refusal("peek", numbers, keys[:-1]) == "bad_value"
    assert client.refusal("peek", [numbers[0], 4000], keys) == "unknown_namespace"


def test_models_are_listed_while_their_session_lives(client: Client, run_dir: Path) -> None:
    card = [["demo"], bytes(16), ["f" * 32], 4]
    with Client(run_dir) as other:
        spec = new_spec()
        number = other.ask("register_namespace", spec)[1]
        mine = next(one for one in client.stats()["namespaces"] if one["id"] == number)["fingerprint"]
        cards = [card, [["two"], bytes(16), [mine], 4, "vllm/sha256", 2, b"seed", "sql", "/sql"]]
        assert other.ask("report", "none", {}, cards) == ["done"]
        tag, listed, namespaces, windows = client.ask("models")
        assert (tag, namespaces, windows) == ("model_list", {mine: number}, {})
        assert listed == [[*card, "chain", 0, b"", "", ""], cards[1]]
        assert other.refusal("report", "none", {}, [[["demo"], b"", ["f"], 4]]) == "bad_value"
        assert other.ask("report", "none", {}) == ["done"]
        assert client.ask("models") == ["model_list", [], {}, {}]
        assert other.ask("report", "none", {}, cards) == ["done"]
    wait_until(lambda: client.ask("models") == ["model_list", [], {}, {}])


def test_frames_run_out_as_backpressure(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--arena", "2MiB", "--region", "2MiB"), Client(tmp_path / "run") as client:
        client.await_arena()
        number, keys = client.namespace(512 << 10), new_chain(6)
        lease, states, frames, _ = client.reserve(number, keys)
        assert (states, len(frames)) == ([FRAME] * 2 + [NONE] * 4, 2)  # half of the arena: the writer may never commit
        assert client.commit(lease, range(2)) == [VISIBLE] * 2
        lease, states, frames, _ = client.reserve(number, keys[32:], keys[16:32])
        assert (states, len(frames)) == ([FRAME] * 2 + [NONE] * 2, 2)
        assert client.commit(lease, range(2)) == [VISIBLE] * 2
        with Client(tmp_path / "run") as other:
            _, lease, _ = other.match([number], keys)
            assert client.reserve(number, new_chain(1))[:2] == (0, [NONE])
        wait_until(lambda: client.reserve(number, new_chain(1))[1] == [FRAME])


def test_the_daemon_stops_with_clients_connected(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--arena", "4MiB", "--region", "2MiB") as running, Client(tmp_path / "run") as client:
        client.reserve(client.namespace(), new_chain(1))
        assert running.stop() == 0
        wait_until(client.session.ended)
        assert not (tmp_path / "run" / "session.sock").exists()


@pytest.mark.stress
def test_a_peer_that_does_not_read_its_replies_loses_its_session(client: Client, run_dir: Path) -> None:
    with Client(run_dir, map_arena=False) as deaf:
        number, keys = deaf.namespace(1 << 20), new_chain(1)
        lease, _, _, _ = deaf.reserve(number, keys)
        deaf.commit(lease, [0])
        _, lease, _ = deaf.match([number], keys)
        deaf.session.sock.setblocking(False)

        def cut() -> bool:
            for _ in range(64):
                if deaf.writable():
                    deaf.send("read", lease, number, 0, 0, 1 << 20)
            try:
                return deaf.session.receive()[0] is None
            except BlockingIOError:
                return False

        wait_until(cut)
        assert client.ask("ping") == ["done"]
        assert client.refusal("ping", session=deaf.token) == "unknown_session"


def test_a_flush_goes_on_when_its_client_has_gone(client: Client, run_dir: Path) -> None:
    numbers = [
        client.namespace(tp_rank=rank % 4, tp_size=4, engine=f"e{rank}") for rank in range(2 * FLUSHED_AT_ONCE + 10)
    ]
    keys = new_chain(1)
    client.store(numbers[-1], keys, [block_of(0)])
    with Client(run_dir) as leaver:
        leaver.send("flush", "dram", [], b"")
        leaver.leave()
    wait_until(lambda: not client.ask("peek", numbers[-1:], keys)[1], "the last namespace is flushed")
    assert client.ask("check")[1] == []
