"""The envelope of requests and how a session begins, as `daemon/PROTOCOL.md` has them, without a line of tiercache."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import msgpack
import pytest
from raw_client import Client, SessionSocket, block_of, hello, new_chain, new_spec
from waiting import wait_until


def refused(number: int, keys: bytes) -> dict[str, list[list[Any]]]:
    """Requests by the code that each is answered with, for a namespace and a chain of one key."""
    wrong_hints = [[-1], [-(2**63)], [0, False, -1], [0, False, 0, -5], [0, False, 0, 0, -1], [0, False, 0, 0, 4]]
    wrong_hints += [[0, False, 0, 0, 2**62], [0, True, 10]]
    other_hints: list[list[Any]] = [[1.5], [None], [0, 1], [0, False, float("nan")], [0, False, float("inf")]]
    other_hints += [[0, False, 0, "1"], [0, False, 0, 0, None], [2**64 - 1 + 0.0]]
    wrong_specs: list[dict[str, Any]] = [{"block_bytes": 0}, {"block_bytes": (256 << 20) + 1}, {"block_size": 0}]
    wrong_specs += [
        {"block_bytes": (2 << 20) + 1},
        {"window_blocks": -1},
        {"tp_rank": 1},
        {"extra": {"note": "x" * 9000}},
    ]
    nameless: list[dict[Any, Any]] = [{1: 2}, {"later": {1: 2}}, {"later": [{b"a": 1}]}, {None: 1}]
    return {
        "malformed": [
            ["teleport", 1, 2],
            ["match", "1", keys],
            ["match", [number], "text"],
            ["match", [number], 7],
            ["match", [number], keys, "1"],
            ["match"],
            ["release", 1.5],
            ["release", None],
            ["abort", 1, 1],
            ["register_namespace", []],
            ["register_namespace", {"engine": "x"}],
            *(["register_namespace", {**new_spec(4096), **later}] for later in nameless),
            ["report", "none", {"a": "b"}],
            *(["hint", [number], keys, *fields] for fields in other_hints),
        ],
        "too_large": [
            ["match", [number], bytes(16 * 65_537)],
            ["reserve", number, b"", bytes(16 * 513), 1000],
            ["flush", "all", [number], bytes(32)],
            ["inspect", [number], bytes(32)],
        ],
        "bad_value": [
            ["match", [], keys],
            ["match", [number] * 2, keys],
            ["match", list(range(257)), keys],
            ["match", [number], b""],
            ["match", [number], bytes(17)],
            ["match", [number], keys, -1],
            ["peek", [], keys],
            ["peek", [number], keys[:-1]],
            ["reserve", number, b"short", keys, 1000],
            ["reserve", number, b"", keys, 0],
            ["commit", 1, bytes(3)],
            ["commit", 1, bytes(4 * 513)],
            ["renew", [1], 0],
            ["flush", "tape", [], b""],
            ["flush", "all", list(range(257)), b""],
            ["report", "none", {str(i): i for i in range(65)}],
            ["report", "glued", {}],
            ["report", "none", {}, [[["demo"], b"", ["f"], 4]]],
            ["specs", []],
            *(["register_namespace", {**new_spec(), **wrong}] for wrong in wrong_specs),
            *(["hint", [number], keys, *fields] for fields in wrong_hints),
        ],
        "unknown_namespace": [["match", [9999], keys], ["peek", [number, 4000], keys], ["inspect", [4000], keys]],
    }


def test_what_cannot_be_served_is_refused_and_changes_nothing(client: Client) -> None:
    number, keys = client.namespace(), new_chain(1)
    client.store(number, keys, [block_of(0)])
    for code, requests in refused(number, keys).items():
        for request in requests:
            assert client.refusal(*request) == code, request
    assert client.length(number, keys) == 1
    assert client.stats()["counters"]["requests_failed"] == 0


def test_bytes_that_are_no_request_are_answered(client: Client) -> None:
    header = client.header()
    start = b"\x96" + msgpack.packb("ping") + b"".join(map(msgpack.packb, header))
    unknown = b"\x93" + msgpack.packb("nope") + msgpack.packb(7)
    ping = msgpack.packb(["ping", *header])
    texts = [["flush", *header, "abcd", [], b""], ["report", *header, "none", {"abcd": 1}], ["abcd", *header]]
    broken_texts = [msgpack.packb(text).replace(b"abcd", b"\xff\xfe\xfd\xfc") for text in texts]
    wrong = [b"", b"\0", b"\xc1", b"\x90", b"{}", b"GET / HTTP/1.1\r\n\r\n", bytes(70_000), bytes(2 << 20)]
    wrong += [ping[:-9], ping[:3], ping + b"\0", msgpack.packb({"ping": 1}), msgpack.packb(["done", 7, 1])]
    wrong += [b"\x91" * 100_000, start + b"\x91" * 100_000, unknown + b"\x91" * 6000 + b"\x90"]
    # Arrays, maps and bytes that are said to be huge, a key that cannot be one, a time that never was.
    wrong += [unknown + end for end in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")]
    wrong += [unknown + b"\x81\x81\x01\x02\x03", unknown + b"\xd7\xff" + b"\xff" * 8]
    for message in (*wrong, *broken_texts):
        reply, _ = client.exchange(message)
        assert (reply[0], reply[3]) == ("error", "malformed"), message[:20]
        assert len(reply[4]) < 1000, "an error does not repeat what came"
    reply, _ = client.exchange(broken_texts[0])
    assert reply[1] == header[0]
    dice = random.Random(22)
    for _ in range(500):  # nearly right
        message = bytearray(dice.choice([ping, *map(msgpack.packb, texts)]))
        for _ in range(dice.randint(1, 6)):
            message[dice.randrange(len(message))] = dice.randrange(256)
        assert client.exchange(bytes(message))[0][0] in ("error", "done", "flushed"), bytes(message)
    assert client.ask("ping") == ["done"]
    assert client.stats()["counters"]["requests_failed"] == 0


def test_missing_trailing_fields_have_defaults(client: Client) -> None:
    number, keys = client.namespace(), new_chain(2)
    client.store(number, keys, [block_of(0), block_of(1)])
    assert client.ask("match", [number], keys) == ["matched", 2, 0, 0, [], False, 0]
    tag, dram, _, lease, frames, _, _ = client.ask("match", [number], keys, 1000)
    assert (tag, dram, lease > 0, frames) == ("matched", 2, True, [])
    assert client.release(lease)


def test_requests_of_another_life_or_session_are_refused(client: Client, run_dir: Path) -> None:
    assert client.refusal("ping", generation=client.generation + 2) == "stale_generation"
    assert client.refusal("ping", session=bytes(16)) == "unknown_session"
    with Client(run_dir) as other:
        token = other.token
        assert client.ask("ping", session=token) == ["done"]
    wait_until(lambda: client.ask("ping", session=token)[:2] == ["error", "unknown_session"])


def test_a_request_past_its_deadline_is_not_done(client: Client) -> None:
    number, keys = client.namespace(), new_chain(1)
    client.store(number, keys, [block_of(0)])
    assert client.refusal("match", [number], keys, 10_000, deadline_s=-1.0) == "expired"
    assert client.refusal("flush", "all", [number], b"", deadline_s=-1.0) == "expired"
    assert client.length(number, keys) == 1
    assert client.stats()["leases"]["read"] == 0


def test_the_deadline_is_on_the_clock_of_the_sender(run_dir: Path) -> None:
    session = SessionSocket(run_dir)
    message = hello(os.urandom(16), map_arena=False)
    message[5] = 1_000_000  # this client's clock started a second ago
    _, _, generation, token, control, *_ = session.hello(message)[0]
    with Client(run_dir) as client:
        assert control == client.control
        assert client.refusal("ping", session=token, generation=generation, deadline_us=999_000) == "expired"
        assert client.ask("ping", session=token, generation=generation, deadline_us=60_000_000) == ["done"]
    session.close()


@pytest.mark.parametrize(
    ("oldest", "newest", "answered"),
    [(2, 9, ["refused", "version"]), (0, 0, ["refused", "version"]), (0, 9, ["welcome", 1])],
)
def test_only_versions_that_meet_are_welcome(run_dir: Path, oldest: int, newest: int, answered: list[object]) -> None:
    session = SessionSocket(run_dir)
    message = hello(os.urandom(16), map_arena=False)
    message[1:3] = oldest, newest
    assert session.hello(message)[0][:2] == answered
    assert answered[0] == "welcome" or session.ended()
    session.close()


def test_hello_needs_the_pidfd_of_its_sender(run_dir: Path) -> None:
    dead = os.posix_spawn("/bin/true", ["true"], os.environ)
    own, parent, ended = (os.pidfd_open(pid) for pid in (os.getpid(), os.getppid(), dead))
    os.waitpid(dead, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for fds in ([], [null], [parent], [ended], [own] * 2, [own] * 17):
        session = SessionSocket(run_dir)
        answer, _ = session.hello(hello(os.urandom(16)), fds)
        assert answer[:2] == ["refused", "malformed"], fds
        assert session.ended()
        session.close()
    for fd in (own, parent, ended, null):
        os.close(fd)


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1",
        b"\x90",
        b"\x91" * 50_000,
        msgpack.packb("hello"),
        msgpack.packb(["hello", 1, 1, b"short", "x", 0, True]),
        msgpack.packb(["hello", 1, 1, bytes(16), "x"]),
        msgpack.packb(["welcome", 1, 1, bytes(16), "x", 0, True]),
        msgpack.packb(["hello", 1, 1, bytes(16), "x" * 5000, 0, True]),
    ],
)
def test_a_packet_that_is_no_hello_is_refused(run_dir: Path, packet: bytes) -> None:
    session = SessionSocket(run_dir)
    answer, _ = session.hello(packet)
    assert answer[:2] == ["refused", "malformed"]
    assert session.ended()
    session.close()


def test_nothing_listens_to_other_users(run_dir: Path, client: Client) -> None:
    assert [(run_dir / name).stat().st_mode & 0o777 for name in ("", "session.sock", "control.sock")] == [
        0o700,
        0o600,
        0o600,
    ]
    assert client.control == f"ipc://{run_dir}/control.sock"
