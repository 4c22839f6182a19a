"""Requests as `daemon/PROTOCOL.md` has them, asked of a real daemon without a line of tiercache."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
from raw_client import (
    DROPPED,
    FRAME,
    HAVE,
    NONE,
    ROOT,
    VISIBLE,
    Client,
    SessionSocket,
    block_of,
    daemon,
    hello,
    new_chain,
    new_spec,
)
from waiting import wait_until

# --- the envelope, and how a session begins ----------------------------------------------------------


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


def stored(client: Client, blocks: int) -> tuple[int, bytes]:
    """A namespace, and a chain of blocks in it."""
    number, keys = client.namespace(), new_chain(blocks)
    assert client.store(number, keys, [block_of(place) for place in range(blocks)]) == [VISIBLE] * blocks
    return number, keys


# --- blocks, by memory and by payload -------------------------------------------------------------


def test_blocks_come_back_through_shared_memory(client: Client, run_dir: Path) -> None:
    number, keys = client.namespace(), new_chain(5)
    blocks = [block_of(i) for i in range(5)]
    assert client.store(number, keys, blocks) == [VISIBLE] * 5
    with Client(run_dir) as other:
        assert other.load(number, keys, 8192) == blocks
        assert other.load(number, keys[: 3 * 16], 8192) == blocks[:3]
        assert other.load(number, new_chain(2), 8192) == []


def test_blocks_come_back_through_payload_parts(run_dir: Path) -> None:
    block_bytes = (2 << 20) - 4096
    with Client(run_dir, map_arena=False) as client:
        number, keys = client.namespace(block_bytes), new_chain(1)
        lease, states, _, _ = client.reserve(number, keys)
        assert states == [FRAME]
        content = os.urandom(block_bytes)
        for offset in range(0, block_bytes, 1 << 20):
            part = content[offset : offset + (1 << 20)]
            assert client.ask("write", lease, 0, offset, payload=[part]) == ["done"]
        assert client.commit(lease, [0]) == [VISIBLE]
        _, lease, _ = client.match([number], keys)
        assert client.ask("read", lease, number, 0, 0, block_bytes) == ["payload", block_bytes, content]
        assert client.ask("read", lease, number, 0, 4097, 3) == ["payload", 3, content[4097:4100]]
        assert client.release(lease)
        with pytest.raises(TimeoutError):  # it did not ask for the arena, and is not given it
            client.take_regions(wait_s=0.05)


def test_without_a_mapping_only_what_was_written_is_committed(run_dir: Path) -> None:
    """A frame holds what its former owner left there, and a tenant without a mapping must not see it."""
    with Client(run_dir, map_arena=False) as client:
        number, keys = client.namespace(8192), new_chain(3)
        lease, states, _, _ = client.reserve(number, keys)
        assert states == [FRAME] * 3
        assert client.refusal("write", lease, 0, 4096, payload=[b"x" * 4096]) == "bad_value"
        assert client.ask("write", lease, 0, 0, payload=[b"x" * 8192]) == ["done"]
        assert client.ask("write", lease, 1, 0, payload=[b"y" * 8191]) == ["done"]
        assert client.commit(lease, [0, 1, 2]) == [VISIBLE, DROPPED, DROPPED]
        assert client.length(number, keys) == 1


def test_what_cannot_be_read_or_written_is_refused(client: Client) -> None:
    number, keys = client.namespace(8192), new_chain(2)
    assert client.refusal("reserve", number, b"", keys[:16] + bytes(16), 9) == "bad_value", "zeros stand for the root"
    assert client.refusal("reserve", number, bytes(16), keys, 9) == "bad_value"
    lease, _, _, _ = client.reserve(number, keys)
    assert client.refusal("write", lease, 2, 0, payload=[b"x"]) == "unknown_lease"
    assert client.refusal("write", lease, 0, 8192, payload=[b"x"]) == "bad_value"
    assert client.refusal("write", lease, 0, -1, payload=[b"x"]) == "bad_value"
    assert client.refusal("write", lease, 0, 0, payload=[b""]) == "bad_value"
    assert client.refusal("write", lease, 0, 0) == "malformed"
    assert client.refusal("write", lease, 0, 0, payload=[b"x", b"y"]) == "malformed"
    assert client.refusal("ping", payload=[b"x"]) == "malformed"
    assert client.commit(lease, [0, 1]) == [VISIBLE] * 2
    assert client.refusal("write", lease, 0, 0, payload=[b"x"]) == "unknown_lease"
    _, lease, _ = client.match([number], keys)
    for index, offset, length in ((2, 0, 1), (-1, 0, 1), (0, 8192, 1), (0, -1, 2), (0, 0, 0), (0, 1, 8192)):
        assert client.refusal("read", lease, number, index, offset, length) == "bad_value"
    assert client.refusal("read", lease + 1, number, 0, 0, 1) == "unknown_lease"
    assert client.release(lease)


def test_a_permuted_list_names_no_wrong_frame(client: Client) -> None:
    number, keys = stored(client, 3)
    permuted = keys[:16] + keys[32:] + keys[16:32]
    dram, lease, frames = client.match([number], permuted, resolve=3)
    assert len(frames[0]) < dram
    assert client.refusal("read", lease, number, 2, 0, 1) == "bad_value"
    _, states, _, _ = client.reserve(
        number, keys[:16] + keys[32:]
    )  # the third block is stored, but not after the first
    assert states == [HAVE, NONE]
    stats = client.stats()
    assert stats["counters"]["broken_chains"] == sum(one["broken_chains"] for one in stats["sessions"]) == 3
    assert stats["health"]["state"] == "ok", "what a client sends is no fault of the daemon's"
    assert client.release(lease)


def test_only_the_window_of_a_windowed_namespace_is_handed_out(client: Client) -> None:
    full, window, keys = client.namespace(), client.namespace(window_blocks=2), new_chain(4)
    blocks = [block_of(i) for i in range(4)]
    client.store(full, keys, blocks)
    client.store(window, keys, blocks)
    dram, lease, frames = client.match([full, window], keys, resolve=4)
    assert (dram, list(map(len, frames))) == (4, [4, 0])
    assert client.ask("resolve", lease, window, 1, 3) == ["frames", 1, b"", False]
    tag, first, packed, _ = client.ask("resolve", lease, window, 2, 2)
    assert (tag, first, len(packed)) == ("frames", 2, 16)
    assert client.refusal("read", lease, window, 1, 0, 1) == "bad_value"
    assert client.ask("read", lease, window, 3, 0, 8192) == ["payload", 8192, blocks[3]]
    assert client.release(lease)


# --- leases ---------------------------------------------------------------------------------------


def test_what_is_ended_twice_is_answered_twice(client: Client) -> None:
    number, keys = client.namespace(), new_chain(3)
    lease, _, _, _ = client.reserve(number, keys)
    assert client.commit(lease, [0]) == [VISIBLE]
    assert client.commit(lease, [0, 1, 1, 7]) == [VISIBLE, VISIBLE, VISIBLE, DROPPED]
    assert client.ask("abort", lease, True) == ["done"]
    assert client.ask("abort", lease, True) == ["done"]
    assert client.commit(lease, [1, 2]) == [DROPPED, DROPPED]
    dram, lease, _ = client.match([number], keys)
    assert dram == 2
    assert client.release(lease)
    assert not client.release(lease)
    assert client.ask("abort", lease, False) == ["done"]


def test_a_lease_is_held_by_sessions_of_one_instance_only(client: Client, run_dir: Path) -> None:
    number, keys = stored(client, 2)
    _, lease, _ = client.match([number], keys)
    with Client(run_dir, client.instance) as worker, Client(run_dir) as stranger:
        assert stranger.refusal("hold", lease) == "unknown_lease"
        assert stranger.refusal("resolve", lease, number, 0, 2) == "unknown_lease"
        assert not stranger.release(lease)
        assert worker.refusal("resolve", lease, number, 0, 2) == "unknown_lease"
        assert worker.ask("hold", lease) == ["done"]
        assert worker.ask("hold", lease) == ["done"]
        assert client.release(lease)
        tag, first, frames, more = worker.ask("resolve", lease, number, 0, 9)
        assert (tag, first, len(frames), more) == ("frames", 0, 16, False)
        assert client.refusal("resolve", lease, number, 0, 2) == "unknown_lease"
        assert worker.release(lease)
        assert worker.refusal("hold", lease) == "unknown_lease"


def test_an_expired_store_is_dropped_and_its_frames_wait_for_the_word(client: Client) -> None:
    number, keys = client.namespace(), new_chain(2)
    before = quarantined_bytes(client)
    lease, _, _, _ = client.reserve(number, keys, ttl_ms=1)
    wait_until(lambda: quarantined_bytes(client) == before + 2 * 8192)
    assert client.commit(lease, [0]) == [DROPPED]
    assert quarantined_bytes(client) == before + 8192
    assert client.ask("abort", lease, True) == ["done"]
    assert quarantined_bytes(client) == before
    assert client.length(number, keys) == 0


def quarantined_bytes(client: Client) -> int:
    return int(client.stats()["arena"]["quarantined_bytes"])


_WRITER = """
import sys
from pathlib import Path
from raw_client import Client, new_chain
with Client(Path(sys.argv[1])) as client:
    client.reserve(client.namespace(8192), new_chain(3))
print("closed", flush=True)
sys.stdin.read()
"""


def test_frames_of_a_closed_session_wait_for_the_end_of_its_process(client: Client, run_dir: Path) -> None:
    before = quarantined_bytes(client)
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"closed\n"
        wait_until(lambda: quarantined_bytes(client) == before + 3 * 8192)
        assert client.stats()["leases"]["quarantined"] >= 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    wait_until(lambda: quarantined_bytes(client) == before)


def test_bye_ends_the_session_and_its_leases(client: Client, run_dir: Path) -> None:
    number, keys = stored(client, 1)
    with Client(run_dir) as other:
        other.match([number], keys)
        assert other.ask("bye") == ["done"]
        wait_until(other.session.ended)
        wait_until(lambda: client.stats()["leases"]["read"] == 0)


# --- pins, flushes, peeks, models, and ends -------------------------------------------------------


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
    tag, blocks, more, _ = client.ask("flush", "dram", [number], keys[10 * 16 : 11 * 16])
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


def test_a_hint_takes_effect(client: Client) -> None:
    number, keys = stored(client, 3)
    other = stored(client, 1)
    assert client.ask("hint", [number], keys + new_chain(1)) == ["hinted", 3], "an empty hint changes nothing"
    assert client.ask("hint", [number], keys, 1, False, 0, 50) == ["hinted", 3]
    wait_until(lambda: client.ask("peek", [number], keys)[1] == 1)
    assert client.ask("peek", [other[0]], other[1])[1] == 1
    assert client.ask("hint", [number], keys, 0, True) == ["hinted", 1]
    assert client.ask("hint", [number], keys, 0, False, 1000, 0, 3) == ["hinted", 1]


# --- namespaces of a later form -------------------------------------------------------------------


def _number(client: Client, spec: dict[str, object]) -> int:
    tag, number, frame_bytes = client.ask("register_namespace", spec)
    assert (tag, frame_bytes) == ("namespace", 4096)
    return int(number)


def test_specs_that_differ_in_unknown_fields_are_different_namespaces(client: Client) -> None:
    """Dropping such a field would give clients of one form the blocks of another."""
    plain = new_spec(4096, engine="evolution")
    later = [
        {**plain, "sink_tokens": 4},
        {**plain, "sink_tokens": 5},
        {**plain, "sink_tokens": "4"},
        {**plain, "sink_tokens": b"4"},
        {**plain, "sink_tokens": None},
        {**plain, "sinks": {"b": 1, "a": [2, 3]}},
        {**plain, "sink_tokens": 4, "other": 1},
    ]
    numbers = [_number(client, spec) for spec in (plain, *later)]
    assert len(set(numbers)) == len(numbers)
    assert [_number(client, spec) for spec in (plain, *later)] == numbers
    assert _number(client, {**plain, "sinks": {"a": [2, 3], "b": 1}}) == numbers[6], "the order of keys does not matter"


def test_blocks_of_a_later_form_are_found_again_after_a_restart(tmp_path: Path) -> None:
    """Blocks of the plain form are not taken for those of the later one."""
    flags = ("--arena", "8MiB", "--region", "2MiB", "--nvme", str(tmp_path / "nvme"), "--nvme-size", "64MiB")
    flags += ("--nvme-segment", "4MiB")
    plain, key = new_spec(4096, engine="restart"), b"r" * 16
    later = {**plain, "sink_tokens": 4}
    with daemon(tmp_path / "run", *flags), Client(tmp_path / "run") as client:
        client.await_arena()
        wait_until(lambda: not client.stats()["health"]["reasons"])
        number = _number(client, later)
        lease = client.ask("reserve", number, b"", key, 5000)[1]
        assert client.ask("commit", lease, bytes(4))[1] == bytes([VISIBLE])
        wait_until(lambda: client.stats()["tiers"]["nvme"]["blocks"] == 1)
    with daemon(tmp_path / "run", *flags), Client(tmp_path / "run") as client:
        wait_until(lambda: client.stats()["tiers"]["nvme"]["blocks"] == 1)
        assert client.ask("peek", [_number(client, later)], key)[1:3] == [0, 1]
        assert client.ask("peek", [_number(client, plain)], key)[1:3] == [0, 0]


def test_stats_have_the_documented_shape(client: Client, run_dir: Path) -> None:
    number, _ = stored(client, 1)
    assert client.ask("report", "mlock", {"loads": 3}) == ["done"]
    stats = client.stats()
    document = (ROOT / "daemon/MONITORING.md").read_text()
    tree = next(part for part in document.split("\n## ") if part.startswith("The stats tree"))
    documented = re.findall(r"^\| `([a-z_]+)` +\| (?!only )", tree, re.MULTILINE)
    assert sorted(stats) == sorted(documented)
    if_asked_for = re.findall(r"^\| `([a-z_]+)` +\| only if asked for", tree, re.MULTILINE)
    (more,) = client.ask("stats", True, 1)[1:]
    assert sorted(more) == sorted(documented + if_asked_for)
    assert stats["health"]["state"] in ("ok", "degraded")
    assert stats["arena"]["bytes"] == stats["arena"]["free_bytes"] + stats["arena"]["used_bytes"] == 80 << 20
    assert stats["tiers"]["dram"]["bytes"] == stats["arena"]["used_bytes"]
    mine = next(session for session in stats["sessions"] if session["registration"] == "mlock")
    assert mine.pop("connected_s") >= 0
    assert mine == {
        "name": "raw",
        "pid": os.getpid(),
        "tenant": "",
        "mapped": True,
        "registration": "mlock",
        "protocol": 1,
        "read_leases": 0,
        "write_leases": 0,
        "broken_chains": 0,
        "counters": {"loads": 3},
    }
    assert next(space for space in stats["namespaces"] if space["id"] == number)["blocks"] == 1
    assert stats["latency"]["Commit"]["count"] > 0
