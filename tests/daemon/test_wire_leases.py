"""The wire protocol without a line of tiercache: leases, and how sessions end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from raw_client import (
    DROPPED,
    VISIBLE,
    Client,
    block_of,
    new_chain,
)
from waiting import wait_until


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
    wait_until(lambda: client.ask("renew", [left], 1)[1] == b"\0")
    assert not client.release(left)
    assert client.release(kept)
    assert client.commit(writing, [2]) == [VISIBLE]
    assert client.refusal("renew", [kept], 0) == "bad_value"


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
    number, keys = client.namespace(), new_chain(1)
    client.store(number, keys, [block_of(0)])
    with Client(run_dir) as other:
        other.match([number], keys)
        assert other.ask("bye") == ["done"]
        wait_until(other.session.ended)
        wait_until(lambda: client.stats()["leases"]["read"] == 0)
