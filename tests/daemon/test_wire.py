"""The wire protocol as `daemon/README.md` has it, spoken to a real daemon without a line of tiercache."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from raw_client import (
    DROPPED,
    FRAME,
    HAVE,
    HELD,
    NONE,
    PENDING,
    ROOT,
    VISIBLE,
    Client,
    SessionSocket,
    block_of,
    content_id,
    daemon,
    hello,
    new_chain,
    new_spec,
    next_key,
    root_key,
    until,
)

REGIONS = 40


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("wire") / "run"
    with daemon(path, "--arena", "80MiB", "--region", "2MiB"):
        yield path


@pytest.fixture
def client(run_dir: Path) -> Iterator[Client]:
    with Client(run_dir) as connected:
        until(lambda: connected.stats()["arena"]["regions"] == REGIONS)
        yield connected


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


def test_regions_come_in_packets_of_at_most_sixteen(run_dir: Path, client: Client) -> None:
    with Client(run_dir) as late:
        while len(late.regions) < REGIONS:
            late.take_regions()
        assert late.region_packets == [16, 16, 8]
        assert sorted(late.regions) == list(range(REGIONS))
        assert late.arena_bytes == sum(map(len, late.regions.values())) == 80 << 20


def test_regions_made_after_the_welcome_are_handed_out_too(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--arena", "384MiB", "--region", "48MiB"), Client(tmp_path / "run") as client:
        while len(client.regions) < 8:
            client.take_regions()
        assert client.stats()["arena"]["populated_bytes"] == 384 << 20
        with pytest.raises(TimeoutError):
            client.take_regions(wait_s=0.05)


def test_stored_blocks_are_not_taken_again(client: Client) -> None:
    number, keys = client.namespace(), new_chain(4)
    assert client.store(number, keys[:32], [block_of(0), block_of(1)]) == [VISIBLE] * 2
    lease, states, frames, _ = client.reserve(number, keys)
    assert (states, len(frames)) == ([HAVE, HAVE, FRAME, FRAME], 2)
    assert client.ask("abort", lease, True) == ["done"]
    assert client.reserve(number, keys[:32])[:3] == (0, [HAVE, HAVE], [])


def test_blocks_that_another_session_writes_are_pending(client: Client, run_dir: Path) -> None:
    number, keys = client.namespace(), new_chain(3)
    first, _, _, _ = client.reserve(number, keys[:32])
    with Client(run_dir) as other:
        second, states, frames, _ = other.reserve(number, keys)
        assert (states, len(frames)) == ([PENDING, PENDING, FRAME], 1)
        assert other.commit(second, [2]) == [HELD]
        assert other.length(number, keys) == 0
        assert client.commit(first, [0, 1]) == [VISIBLE, VISIBLE]
        assert other.length(number, keys) == 3


def test_a_block_behind_an_aborted_one_is_dropped(client: Client) -> None:
    number, keys = client.namespace(), new_chain(2)
    first, _, _, _ = client.reserve(number, keys[:16])
    second, states, _, _ = client.reserve(number, keys[16:], parent=keys[:16])
    assert states == [FRAME]
    assert client.ask("abort", first, True) == ["done"]
    assert client.commit(second, [0]) == [DROPPED]
    assert client.reserve(number, keys[16:], parent=keys[:16]) == (0, [], [], True)


def test_a_permuted_list_names_no_wrong_frame(client: Client) -> None:
    number, keys = client.namespace(), new_chain(3)
    client.store(number, keys, [block_of(i) for i in range(3)])
    before = client.stats()["counters"]["invariant_failures"]
    permuted = keys[:16] + keys[32:] + keys[16:32]
    dram, lease, frames = client.match([number], permuted, resolve=3)
    assert len(frames[0]) < dram
    assert client.refusal("read", lease, number, 2, 0, 1) == "bad_value"
    assert client.stats()["counters"]["invariant_failures"] > before
    assert client.release(lease)


def test_a_list_that_is_no_chain_across_two_namespaces_is_a_miss(client: Client) -> None:
    number, other, keys = client.namespace(), client.namespace(), new_chain(3)
    client.store(number, keys, [block_of(i) for i in range(3)])
    client.store(other, keys[:32], [block_of(i) for i in range(2)])
    assert client.match([number, other], keys, ttl_ms=0)[0] == 2
    broken = keys[:16] + new_chain(1) + keys[32:]
    client.store(other, broken[:32], [block_of(i) for i in range(2)])
    assert client.match([number, other], broken)[:2] == (0, 0)
    assert client.length(number, keys) == 3


def test_only_the_window_of_a_windowed_namespace_is_handed_out(client: Client) -> None:
    full, window, keys = client.namespace(), client.namespace(window_blocks=2), new_chain(4)
    blocks = [block_of(i) for i in range(4)]
    client.store(full, keys, blocks)
    client.store(window, keys, blocks)
    dram, lease, frames = client.match([full, window], keys, resolve=4)
    assert (dram, list(map(len, frames))) == (4, [4, 0])
    assert client.ask("resolve", lease, window, 1, 3) == ["frames", 1, b"", b"", False]
    tag, first, packed, _, _ = client.ask("resolve", lease, window, 2, 2)
    assert (tag, first, len(packed)) == ("frames", 2, 16)
    assert client.refusal("read", lease, window, 1, 0, 1) == "bad_value"
    assert client.ask("read", lease, window, 3, 0, 8192) == ["payload", 8192, blocks[3]]
    assert client.release(lease)


def test_windowed_blocks_do_not_depend_on_the_block_before(client: Client) -> None:
    window, keys = client.namespace(window_blocks=1), new_chain(2)
    first, _, _, _ = client.reserve(window, keys[:16])
    second, states, _, _ = client.reserve(window, keys)
    assert states == [PENDING, FRAME]
    assert client.commit(second, [1]) == [VISIBLE]
    assert client.length(window, keys) == 2
    client.ask("abort", first, True)
    assert client.length(window, keys) == 2


# --- envelope and evolution ----------------------------------------------------------------------


def test_unknown_tags_and_wrong_types_are_answered(client: Client) -> None:
    assert client.refusal("teleport", 1, 2) == "malformed"
    number, keys = client.namespace(), new_chain(1)
    wrong: list[list[Any]] = [
        ["match", "1", keys], ["match", [number], "text"], ["match", [number], 7], ["match", [number], keys, "1"],
        ["release", 1.5], ["release", None], ["abort", 1, 1], ["register_namespace", []],
        ["register_namespace", {"engine": "x"}], ["report", "none", {"a": "b"}], ["match"],
    ]  # fmt: skip
    for request in wrong:
        assert client.refusal(*request) == "malformed", request


def test_bytes_that_are_no_request_are_answered(client: Client) -> None:
    header = client.header()
    broken_text = msgpack.packb(["flush", *header, "abcd", [], b""]).replace(b"abcd", b"\xff\xfe\xfd\xfc")
    deep = b"\x96" + msgpack.packb("ping") + b"".join(map(msgpack.packb, header)) + b"\x91" * 100_000
    for message in (b"", b"\xc1", b"\x90", b"\x91" * 100_000, deep, broken_text, b"{}", b"\x00" * 70_000):
        reply, _ = client.exchange(message)
        assert (reply[0], reply[3]) == ("error", "malformed"), message[:20]
    reply, _ = client.exchange(broken_text)
    assert reply[1] == header[0]
    assert client.ask("ping") == ["done"]
    assert client.stats()["counters"]["requests_failed"] == 0


def test_missing_trailing_fields_have_defaults(client: Client) -> None:
    number, keys = client.namespace(), new_chain(2)
    client.store(number, keys, [block_of(0), block_of(1)])
    assert client.ask("match", [number], keys) == ["matched", 2, 0, 0, [], False]
    tag, dram, _, lease, frames, _ = client.ask("match", [number], keys, 1000)
    assert (tag, dram, lease > 0, frames) == ("matched", 2, True, [])
    assert client.release(lease)


def test_extra_trailing_fields_are_ignored(client: Client, run_dir: Path) -> None:
    assert client.ask("ping", "from", {"a": ["later", 1]}, b"release") == ["done"]
    number, keys = client.namespace(), new_chain(1)
    assert client.ask("match", [number], keys, 0, 0, False, False, [1, 2], None) == ["matched", 0, 0, 0, [], False]
    session = SessionSocket(run_dir)
    welcome, _ = session.hello([*hello(os.urandom(16), map_arena=False), "more", 7])
    assert welcome[0] == "welcome"
    session.close()


def test_counts_over_a_limit_are_refused(client: Client) -> None:
    number = client.namespace()
    assert client.refusal("match", [number], bytes(16 * 65_537)) == "too_large"
    assert client.refusal("reserve", number, b"", bytes(16 * 513), 1000) == "too_large"
    assert client.refusal("flush", "all", [number], bytes(32)) == "too_large"
    assert client.refusal("match", [], bytes(16)) == "bad_value"
    assert client.refusal("match", [number] * 2, bytes(16)) == "bad_value"
    assert client.refusal("match", list(range(257)), bytes(16)) == "bad_value"
    assert client.refusal("flush", "all", list(range(257)), b"") == "bad_value"
    assert client.refusal("match", [number], b"") == "bad_value"
    assert client.refusal("match", [number], bytes(17)) == "bad_value"
    assert client.refusal("match", [number], bytes(16), -1) == "bad_value"
    assert client.refusal("reserve", number, b"short", bytes(16), 1000) == "bad_value"
    assert client.refusal("reserve", number, b"", bytes(16), 0) == "bad_value"
    assert client.refusal("commit", 1, bytes(3)) == "bad_value"
    assert client.refusal("commit", 1, bytes(4 * 513)) == "bad_value"
    assert client.refusal("report", "none", {str(i): i for i in range(65)}) == "bad_value"
    assert client.refusal("report", "glued", {}) == "bad_value"
    assert client.refusal("flush", "tape", [], b"") == "bad_value"
    assert client.refusal("match", [9999], bytes(16)) == "unknown_namespace"


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_bytes": 0}, {"block_bytes": (256 << 20) + 1}, {"block_bytes": (2 << 20) + 1}, {"block_size": 0},
        {"window_blocks": -1}, {"tp_rank": 1}, {"extra": {"note": "x" * 9000}},
    ],
)  # fmt: skip
def test_specs_that_cannot_be_served_are_refused(client: Client, wrong: dict[str, Any]) -> None:
    assert client.refusal("register_namespace", {**new_spec(), **wrong}) == "bad_value"


def test_equal_specs_have_one_number_and_others_another(client: Client, run_dir: Path) -> None:
    spec = new_spec()
    number = client.ask("register_namespace", spec)[1]
    with Client(run_dir) as other:
        assert other.ask("register_namespace", {**spec, "tp_size": 1, "extra": {}})[1] == number
        assert other.ask("register_namespace", {**spec, "tp_size": 2})[1] != number


def test_requests_of_another_life_or_session_are_refused(client: Client, run_dir: Path) -> None:
    assert client.refusal("ping", generation=client.generation + 2) == "stale_generation"
    assert client.refusal("ping", session=bytes(16)) == "unknown_session"
    with Client(run_dir) as other:
        token = other.token
        assert client.ask("ping", session=token) == ["done"]
    until(lambda: client.ask("ping", session=token)[:2] == ["error", "unknown_session"])


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
    message[5] = 1_000_000  # this client's clock began a second ago
    _, _, generation, token, control, *_ = session.hello(message)[0]
    with Client(run_dir) as client:
        assert control == client.control
        assert client.refusal("ping", session=token, generation=generation, deadline_us=999_000) == "expired"
        assert client.ask("ping", session=token, generation=generation, deadline_us=60_000_000) == ["done"]
    session.close()


# --- hello ---------------------------------------------------------------------------------------


def test_versions_that_do_not_meet_are_refused(run_dir: Path) -> None:
    for oldest, newest in ((2, 9), (0, 0)):
        session = SessionSocket(run_dir)
        message = hello(os.urandom(16))
        message[1:3] = oldest, newest
        answer, _ = session.hello(message)
        assert answer[:2] == ["refused", "version"]
        assert session.ended()
        session.close()


def test_a_newer_client_that_still_speaks_this_version_is_welcome(run_dir: Path) -> None:
    session = SessionSocket(run_dir)
    message = hello(os.urandom(16), map_arena=False)
    message[1:3] = 0, 9
    assert session.hello(message)[0][:2] == ["welcome", 1]
    session.close()


def test_hello_needs_the_pidfd_of_its_sender(run_dir: Path) -> None:
    read_end, write_end = os.pipe()
    parent = os.pidfd_open(os.getppid())
    own = os.pidfd_open(os.getpid())
    for fds in ([], [read_end], [parent], [own, own]):
        session = SessionSocket(run_dir)
        answer, _ = session.hello(hello(os.urandom(16)), fds)
        assert answer[:2] == ["refused", "malformed"], fds
        assert session.ended()
        session.close()
    for fd in (read_end, write_end, parent, own):
        os.close(fd)


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1", b"\x90", b"\x91" * 50_000, msgpack.packb("hello"),
        msgpack.packb(["hello", 1, 1, b"short", "x", 0, True]), msgpack.packb(["hello", 1, 1, bytes(16), "x"]),
        msgpack.packb(["welcome", 1, 1, bytes(16), "x", 0, True]),
        msgpack.packb(["hello", 1, 1, bytes(16), "x" * 5000, 0, True]),
    ],
)  # fmt: skip
def test_a_packet_that_is_no_hello_is_refused(run_dir: Path, packet: bytes) -> None:
    session = SessionSocket(run_dir)
    answer, _ = session.hello(packet)
    assert answer[:2] == ["refused", "malformed"]
    assert session.ended()
    session.close()


def test_a_packet_after_hello_ends_the_session(client: Client, run_dir: Path) -> None:
    session = SessionSocket(run_dir)
    _, _, _, token, *_ = session.hello(hello(os.urandom(16), map_arena=False))[0]
    session.send(["hello"])
    assert session.ended()
    assert client.refusal("ping", session=token) == "unknown_session"
    session.close()


def test_connections_that_never_say_hello_are_closed(run_dir: Path) -> None:
    sessions = [SessionSocket(run_dir) for _ in range(2)]
    sessions[1].sock.sendmsg([b""])
    for session in sessions:
        assert session.ended()
        session.close()


def test_descriptors_do_not_pile_up(client: Client, run_dir: Path) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{client.stats()['daemon']['pid']}/fd"))

    def connect_in_every_way() -> None:
        with Client(run_dir) as other:
            other.ask("ping")
        for message in (b"\xc1", [*hello(os.urandom(16))[:2], 0, *hello(os.urandom(16))[3:]]):
            session = SessionSocket(run_dir)
            session.hello(message)
            session.close()

    connect_in_every_way()
    before = count()
    for _ in range(10):
        connect_in_every_way()
    until(lambda: count() <= before)


# --- leases --------------------------------------------------------------------------------------


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
    number, keys = client.namespace(), new_chain(2)
    client.store(number, keys, [block_of(0), block_of(1)])
    _, lease, _ = client.match([number], keys)
    with Client(run_dir, client.instance) as worker, Client(run_dir) as stranger:
        assert stranger.refusal("hold", lease) == "unknown_lease"
        assert stranger.refusal("resolve", lease, number, 0, 2) == "unknown_lease"
        assert not stranger.release(lease)
        assert worker.refusal("resolve", lease, number, 0, 2) == "unknown_lease"
        assert worker.ask("hold", lease) == ["done"]
        assert worker.ask("hold", lease) == ["done"]
        assert client.release(lease)
        tag, first, frames, extents, more = worker.ask("resolve", lease, number, 0, 9)
        assert (tag, first, len(frames), extents, more) == ("frames", 0, 16, b"", False)
        assert client.refusal("resolve", lease, number, 0, 2) == "unknown_lease"
        assert worker.release(lease)
        assert worker.refusal("hold", lease) == "unknown_lease"


def test_a_lease_lasts_as_long_as_it_is_renewed(client: Client) -> None:
    number, keys = client.namespace(), new_chain(3)
    client.store(number, keys[:32], [block_of(0), block_of(1)])
    _, kept, _ = client.match([number], keys, ttl_ms=300)
    _, left, _ = client.match([number], keys, ttl_ms=300)
    writing, _, _, _ = client.reserve(number, keys, ttl_ms=300)
    assert client.ask("renew", [kept, writing, 5], 30_000) == ["renewed", b"\1\1\0"]
    until(lambda: client.ask("renew", [left], 1)[1] == b"\0")
    assert not client.release(left)
    assert client.release(kept)
    assert client.commit(writing, [2]) == [VISIBLE]
    assert client.refusal("renew", [kept], 0) == "bad_value"


def test_an_expired_store_is_dropped_and_its_frames_wait_for_the_word(client: Client) -> None:
    number, keys = client.namespace(), new_chain(2)
    before = quarantined_bytes(client)
    lease, _, _, _ = client.reserve(number, keys, ttl_ms=1)
    until(lambda: quarantined_bytes(client) == before + 2 * 8192)
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
        [sys.executable, "-c", _WRITER, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "daemon")},
    )  # fmt: skip
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"closed\n"
        until(lambda: quarantined_bytes(client) == before + 3 * 8192)
        assert client.stats()["leases"]["quarantined"] >= 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    until(lambda: quarantined_bytes(client) == before)


def test_bye_ends_the_session_and_its_leases(client: Client, run_dir: Path) -> None:
    number, keys = client.namespace(), new_chain(1)
    client.store(number, keys, [block_of(0)])
    with Client(run_dir) as other:
        other.match([number], keys)
        assert other.ask("bye") == ["done"]
        until(other.session.ended)
        until(lambda: client.stats()["leases"]["read"] == 0)


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
    assert client.ask("prefetch", [number], keys) == ["matched", 2, 0, 0, [], False]


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

    until(lambda: table()["blocks"] == 10)
    assert client.ask("flush", "all", [number], b"") == ["flushed", 10, False]
    assert client.length(number, keys) == 0
    assert client.reserve(number, keys[:16])[1] == [FRAME]


def test_a_flush_drops_what_is_being_written(client: Client) -> None:
    number, keys = client.namespace(), new_chain(1)
    lease, _, _, _ = client.reserve(number, keys)
    client.ask("flush", "all", [number], b"")
    assert client.commit(lease, [0]) == [DROPPED]
    assert client.length(number, keys) == 0


def test_a_peek_finds_what_a_match_would(client: Client) -> None:
    numbers, keys = [client.namespace(), client.namespace()], new_chain(5)
    for number, stored in zip(numbers, (4, 2), strict=True):
        client.store(number, keys[: stored * 16], [block_of(place) for place in range(stored)])
    before = client.stats()["counters"]
    assert client.ask("peek", numbers, keys) == ["peeked", 2, 0, [[4, 0], [2, 0]]]
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
        tag, listed, namespaces = client.ask("models")
        assert (tag, namespaces) == ("model_list", {mine: number})
        assert listed == [[*card, "chain", 0, b"", "", ""], cards[1]]
        assert other.refusal("report", "none", {}, [[["demo"], b"", ["f"], 4]]) == "bad_value"
        assert other.ask("report", "none", {}) == ["done"]
        assert client.ask("models") == ["model_list", [], {}]
        assert other.ask("report", "none", {}, cards) == ["done"]
    until(lambda: client.ask("models") == ["model_list", [], {}])


def test_frames_run_out_as_backpressure(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--arena", "2MiB", "--region", "2MiB"), Client(tmp_path / "run") as client:
        until(lambda: client.stats()["arena"]["regions"] == 1)
        number, keys = client.namespace(512 << 10), new_chain(6)
        lease, states, frames, _ = client.reserve(number, keys)
        assert (states, len(frames)) == ([FRAME] * 4 + [NONE] * 2, 4)
        assert client.commit(lease, range(4)) == [VISIBLE] * 4
        with Client(tmp_path / "run") as other:
            _, lease, _ = other.match([number], keys)
            assert client.reserve(number, new_chain(1))[:2] == (0, [NONE])
        until(lambda: client.reserve(number, new_chain(1))[1] == [FRAME])


def test_stats_have_the_documented_shape(client: Client, run_dir: Path) -> None:
    number, keys = client.namespace(), new_chain(1)
    client.store(number, keys, [block_of(0)])
    assert client.ask("report", "mlock", {"loads": 3}) == ["done"]
    stats = client.stats()
    documented = re.findall(r"^\| `([a-z_]+)` +\| (?!only )", _section("The stats tree"), re.MULTILINE)
    assert sorted(stats) == sorted(documented)
    if_asked_for = re.findall(r"^\| `([a-z_]+)` +\| only if asked for", _section("The stats tree"), re.MULTILINE)
    (more,) = client.ask("stats", True, 1)[1:]
    assert sorted(more) == sorted(documented + if_asked_for)
    assert stats["health"]["state"] in ("ok", "degraded")
    assert stats["arena"]["bytes"] == stats["arena"]["free_bytes"] + stats["arena"]["used_bytes"] == 80 << 20
    assert stats["tiers"]["dram"]["bytes"] == stats["arena"]["used_bytes"]
    mine = next(session for session in stats["sessions"] if session["registration"] == "mlock")
    assert mine.pop("connected_s") >= 0
    assert mine == {
        "name": "raw", "pid": os.getpid(), "tenant": "", "mapped": True, "registration": "mlock", "protocol": 1,
        "read_leases": 0, "write_leases": 0, "counters": {"loads": 3},
    }  # fmt: skip
    assert next(space for space in stats["namespaces"] if space["id"] == number)["blocks"] == 1
    assert stats["latency"]["Commit"]["count"] > 0


def test_the_daemon_stops_with_clients_connected(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--arena", "4MiB", "--region", "2MiB") as running, Client(tmp_path / "run") as client:
        client.reserve(client.namespace(), new_chain(1))
        assert running.stop() == 0
        until(client.session.ended)
        assert not (tmp_path / "run" / "session.sock").exists()


def test_a_name_cannot_forge_lines_of_the_log(client: Client, run_dir: Path) -> None:
    with Client(run_dir, name="x\nERROR all is lost\x1b[2J"):
        assert "x?ERROR all is lost?[2J" in [session["name"] for session in client.stats()["sessions"]]


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

        until(cut)
        assert client.ask("ping") == ["done"]
        assert client.refusal("ping", session=deaf.token) == "unknown_session"


# --- the document --------------------------------------------------------------------------------


def _document() -> str:
    return (ROOT / "daemon" / "README.md").read_text()


def _section(title: str) -> str:
    return next(part for part in _document().split("\n## ") if part.startswith(title))


def _vectors() -> dict[str, bytes]:
    found = re.findall(r"^ *vector ([a-z0-9_]+) +([0-9a-f]+)$", _document(), re.MULTILINE)
    return {name: bytes.fromhex(digits) for name, digits in found}


def test_the_documented_vectors_are_what_the_code_computes() -> None:
    import msgspec

    from tiercache import messages
    from tiercache.checksum import CHECKSUM_LANES, block_checksum
    from tiercache.keys import KeyChain
    from tiercache.keys import content_id as code_content_id
    from tiercache.keys import root_key as code_root_key
    from tiercache.layout import NamespaceSpec

    plain = code_root_key("demo")
    salted = code_root_key("demo", salt="s3cret", epoch=2, extra=[("lora", "b7"), ("config", "9f")])
    chain = KeyChain(plain, 4, [1, 2, 3, 4, 100, 200, 300, 400_000])
    with_extra = KeyChain(plain, 4)
    with_extra.extend([1, 2, 3, 4], extra=b"image:77")
    match = messages.Match(7, bytes(range(16)), 81985529216486895, 5_000_000, [1], chain.packed(), 30_000, 2)
    spec = NamespaceSpec(
        engine="demo/1", layout="layer,2,slot,kv_head,head_dim", dtype="bfloat16", block_size=4, block_bytes=8192
    )
    assert _vectors() == {
        "content": code_content_id("demo"),
        "root_plain": plain,
        "root_salted": salted,
        "h_1": chain.key(0),
        "h_2": chain.key(1),
        "h_1_with_extra": with_extra.key(0),
        "frames": messages.pack_frames([0, 8192, 3 << 48 | 4096]),
        "indices": messages.pack_indices([0, 1, 511]),
        "extents": messages.pack_extents([messages.Extent(3, 0, 2, 0, 8192, 4096, 4096, 0x0123456789ABCDEF)]),
        "lanes_hello": block_checksum(b"hello", 7, CHECKSUM_LANES).to_bytes(8, "big"),
        "match": msgspec.msgpack.encode(match),
        "fingerprint": bytes.fromhex(spec.fingerprint()),
    }


def test_the_documented_vectors_are_what_a_stranger_computes() -> None:
    vectors = _vectors()
    assert vectors["content"] == content_id("demo")
    assert vectors["root_plain"] == root_key("demo")
    assert vectors["root_salted"] == root_key("demo", b"s3cret", 2, [("lora", "b7"), ("config", "9f")])
    assert vectors["h_1"] == next_key(vectors["root_plain"], [1, 2, 3, 4])
    assert vectors["h_2"] == next_key(vectors["h_1"], [100, 200, 300, 400_000])
    assert vectors["h_1_with_extra"] == next_key(vectors["root_plain"], [1, 2, 3, 4], b"image:77")
    assert vectors["frames"] == struct.pack("<3Q", 0, 8192, (3 << 48) + 4096)
    assert vectors["indices"] == struct.pack("<3I", 0, 1, 511)
    assert vectors["extents"] == struct.pack("<IHBBQIIQ", 3, 0, 2, 0, 8192, 4096, 4096, 0x0123456789ABCDEF)
    assert vectors["lanes_hello"] == _lanes(b"hello", 7).to_bytes(8, "big")
    header = [7, bytes(range(16)), 81985529216486895, 5_000_000]
    keys = vectors["h_1"] + vectors["h_2"]
    assert vectors["match"] == msgpack.packb(["match", *header, [1], keys, 30_000, 2, False, False])


def _lanes(data: bytes, seed: int) -> int:
    """Checksum kind 2 as the document has it, of at most one stripe."""

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    golden = 0x9E3779B97F4A7C15
    lanes = struct.unpack(f"<{-(-len(data) // 4)}I", data + bytes(-len(data) % 4))
    stripe = sum(lane * mix((number + 1) * golden % 2**64) for number, lane in enumerate(lanes))
    return mix(mix((stripe + golden) % 2**64) ^ seed)


def test_the_documented_limits_and_tags_are_those_of_the_code() -> None:
    import msgspec

    from tiercache import messages

    limits = re.findall(r"^\| `([A-Z_]+)` +\| ([0-9 ]+) ", _section("Limits"), re.MULTILINE)
    assert len(limits) > 10
    for name, value in limits:
        assert int(value.replace(" ", "")) == getattr(messages, name), name
    for union in (messages.AnyRequest, messages.AnyReply):
        for struct_type in union.__args__:
            fields = [field.name for field in msgspec.structs.fields(struct_type)]
            own = fields[4:] if union is messages.AnyRequest else fields[2:]
            tag = struct_type.__struct_config__.tag
            row = re.search(rf"^\| `{tag}` +\|(.*)\|$", _document(), re.MULTILINE)
            assert row is not None, tag
            assert re.findall(r"`([a-z_]+)` \(", row[1]) == own, tag
    for code in messages.ErrorCode:
        assert f"| `{code.value}`" in _section("Error codes")


def test_nothing_listens_to_other_users(run_dir: Path, client: Client) -> None:
    assert [(run_dir / name).stat().st_mode & 0o777 for name in ("", "session.sock", "control.sock")] == [
        0o700, 0o600, 0o600,
    ]  # fmt: skip
    assert client.control == f"ipc://{run_dir}/control.sock"
