"""Faults 9, 12, 39: writers that stop half-way, lose their session, fork, are stopped or killed.

A frame that was given to a writer goes to no other client until the writer has said that it is done, or
its process has exited. All arenas here have 16 frames, so whatever is given away is seen.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable

import pytest
from chains import chain_of, key_of
from fault_blocks import content, spec_of
from fault_messages import greet
from fault_peer import Peer
from fault_processes import Child, Daemon
from waiting import state_of, wait_until

from tiercache.protocol import messages as m

SPEC = spec_of(256 << 10)
FRAMES = 16
TAKEN = 5
SETTINGS = {"block_bytes": SPEC.block_bytes}
QUARANTINE = ("--arena", "4MiB", "--region", "2MiB", "--quarantine-per-client", "4MiB")
_fresh = itertools.count()


@pytest.fixture
def small(start_daemon: Callable[..., Daemon]) -> Daemon:
    """Sixteen frames, all of which one client may have in quarantine."""
    return start_daemon(*QUARANTINE)


def press(peer: Peer, expect: int) -> tuple[bytes, set[int]]:
    """Store new chains of 16 blocks; each must get exactly the `expect` frames that are not taken."""
    given: set[int] = set()
    for _ in range(3):
        keys = chain_of(f"pressure {next(_fresh)}", FRAMES)
        frames = peer.store(SPEC, keys)
        assert len(frames) == expect
        given.update(frames)
    assert len(given) == expect, "the same frames each time: there are no others"
    return keys, given


def all_back(peer: Peer) -> None:
    """Within the deadline all 16 frames can be had again."""
    wait_until(lambda: len(peer.store(SPEC, chain_of(f"back {next(_fresh)}", FRAMES))) == FRAMES, "all frames are back")
    stats = peer.stats()
    assert stats["arena"]["quarantined_bytes"] == 0
    assert stats["leases"]["quarantined"] == 0
    assert stats["health"]["state"] == "ok"


def half_written(child: Child, ttl_ms: int = 30_000) -> set[int]:
    """The child reserves blocks and writes some of them."""
    frames = child.do("reserve", seed="half", blocks=TAKEN, ttl_ms=ttl_ms)["frames"]
    assert len(frames) == TAKEN
    child.do("fill", first=0, count=TAKEN - 2)
    return set(frames)


def test_9_late_write_after_reconnect_never_lands_in_new_owner(
    small: Daemon, start_child: Callable[..., Child], connect: Callable[..., Peer]
) -> None:
    child, other = start_child("peer", small, **SETTINGS), connect(small)
    taken = half_written(child)
    child.do("reconnect")
    wait_until(lambda: other.stats()["arena"]["quarantined_bytes"] > 0, "the lost session's frames are set aside")
    keys, given = press(other, FRAMES - TAKEN)
    assert not given & taken
    child.do("scribble")
    assert other.load(SPEC, keys) == FRAMES - TAKEN, "the late write landed in no other block"
    assert other.length(SPEC, chain_of("half", TAKEN)) == 0
    child.do("abort", finished=True)  # the new session of the same instance gives the word
    all_back(other)


def test_9_a_dropped_connection_is_no_end_of_writing(
    small: Daemon, start_child: Callable[..., Child], connect: Callable[..., Peer]
) -> None:
    child, other = start_child("peer", small, **SETTINGS), connect(small)
    taken = half_written(child)
    child.do("hang_up")
    wait_until(lambda: other.stats()["arena"]["quarantined_bytes"] > 0, "the lost session's frames are set aside")
    keys, given = press(other, FRAMES - TAKEN)
    assert not given & taken
    child.do("scribble")
    assert other.load(SPEC, keys) == FRAMES - TAKEN
    child.kill()
    all_back(other)


def test_9_a_commit_after_the_lease_expired_publishes_nothing(small: Daemon, connect: Callable[..., Peer]) -> None:
    writer, other = connect(small), connect(small)
    keys = chain_of("late", TAKEN)
    reserved = writer.reserve(SPEC, keys, ttl_ms=50)
    indices = writer.fill(SPEC, keys, reserved)
    wait_until(lambda: other.stats()["leases"]["quarantined"] == 1, "the lease is over")
    mine, given = press(other, FRAMES - TAKEN)
    assert not given & set(m.unpack_frames(reserved.frames))
    assert writer.commit(reserved.lease, indices) == [m.CommitState.DROPPED] * TAKEN
    assert other.length(SPEC, keys) == 0
    assert other.load(SPEC, mine) == FRAMES - TAKEN
    all_back(other)  # the commit said that its copies are complete


def test_9_an_abort_without_the_word_keeps_the_frames(small: Daemon, connect: Callable[..., Peer]) -> None:
    writer, other = connect(small), connect(small)
    reserved = writer.reserve(SPEC, chain_of("unsure", TAKEN))
    writer.ask(m.Abort, lease=reserved.lease, finished=False)
    press(other, FRAMES - TAKEN)
    writer.ask(m.Abort, lease=reserved.lease, finished=False)
    press(other, FRAMES - TAKEN)
    writer.ask(m.Abort, lease=reserved.lease, finished=True)
    all_back(other)


def test_9_no_other_client_can_end_the_quarantine(small: Daemon, connect: Callable[..., Peer]) -> None:
    writer, other = connect(small), connect(small)
    reserved = writer.reserve(SPEC, chain_of("mine", TAKEN))
    indices = list(range(TAKEN))
    other.ask(m.Abort, lease=reserved.lease, finished=True)
    assert other.commit(reserved.lease, indices) == [m.CommitState.DROPPED] * TAKEN
    press(other, FRAMES - TAKEN)
    assert writer.commit(reserved.lease, indices) == [m.CommitState.VISIBLE] * TAKEN


def test_12_a_writer_that_dies_half_way_publishes_nothing(
    small: Daemon, start_child: Callable[..., Child], connect: Callable[..., Peer]
) -> None:
    child, other = start_child("peer", small, **SETTINGS), connect(small)
    half_written(child)
    child.kill()
    all_back(other)
    assert other.length(SPEC, chain_of("half", TAKEN)) == 0
    other.store(SPEC, chain_of("half", TAKEN))
    assert other.load(SPEC, chain_of("half", TAKEN)) == TAKEN


def test_39_a_forked_child_that_keeps_the_sockets_open(
    small: Daemon, start_child: Callable[..., Child], connect: Callable[..., Peer], kill_later: Callable[[int], None]
) -> None:
    """No end of file comes, but the writer's pidfd shows that it is dead."""
    child, other = start_child("peer", small, **SETTINGS), connect(small)
    taken = half_written(child)
    fork = child.do("fork")
    kill_later(fork)
    _, given = press(other, FRAMES - TAKEN)
    assert not given & taken
    child.kill()
    assert state_of(fork) in ("S", "R"), "the fork lives and holds the session socket"
    all_back(other)
    assert other.length(SPEC, chain_of("half", TAKEN)) == 0


def test_39_hanging_up_with_a_fork_is_no_exit(
    small: Daemon, start_child: Callable[..., Child], connect: Callable[..., Peer], kill_later: Callable[[int], None]
) -> None:
    """The fork dies, the writer reconnects: the frames still wait for the writer's own process."""
    child, other = start_child("peer", small, **SETTINGS), connect(small)
    taken = half_written(child)
    fork = Fork(child.do("fork"), kill_later)
    child.do("reconnect")
    fork.kill()
    keys, given = press(other, FRAMES - TAKEN)
    assert not given & taken
    child.do("scribble")
    assert other.load(SPEC, keys) == FRAMES - TAKEN
    child.kill()
    all_back(other)


class Fork:
    """A process that a child of ours forked."""

    def __init__(self, pid: int, kill_later: Callable[[int], None]) -> None:
        self.pid = pid
        kill_later(pid)

    def kill(self) -> None:
        """SIGKILL, and wait for a zombie: its parent does not reap it."""
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: state_of(self.pid) in ("Z", ""), "the fork is dead")


def test_39_a_writer_stopped_in_mid_copy(
    small: Daemon, start_child: Callable[..., Child], connect: Callable[..., Peer]
) -> None:
    child, other = start_child("peer", small, **SETTINGS), connect(small)
    taken = half_written(child, ttl_ms=100)
    child.stop()
    wait_until(lambda: other.stats()["leases"]["quarantined"] == 1, "its lease is over")
    keys, given = press(other, FRAMES - TAKEN)
    assert not given & taken
    child.go_on()
    child.do("scribble")
    assert child.do("commit") == [m.CommitState.DROPPED] * TAKEN
    assert other.load(SPEC, keys) == FRAMES - TAKEN
    assert other.length(SPEC, chain_of("half", TAKEN)) == 0
    all_back(other)


def test_39_killed_while_stopped(
    small: Daemon, start_child: Callable[..., Child], connect: Callable[..., Peer]
) -> None:
    child, other = start_child("peer", small, **SETTINGS), connect(small)
    half_written(child)
    child.stop()
    press(other, FRAMES - TAKEN)
    child.kill()
    all_back(other)


def test_39_a_peer_cannot_lend_another_process_for_its_own(small: Daemon, start_child: Callable[..., Child]) -> None:
    """The pidfd of another process would end the quarantine too early, or never."""
    child = start_child("peer", small, **SETTINGS)
    answer = greet(small.run_dir, pid=child.pid)
    assert isinstance(answer, m.Refused)
    assert answer.code == m.ErrorCode.MALFORMED.value
    assert str(child.pid) in answer.text


def test_12_the_quarantine_of_one_client_is_capped(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child], connect: Callable[..., Peer]
) -> None:
    daemon = start_daemon("--arena", "4MiB", "--region", "2MiB", "--quarantine-per-client", "1MiB")
    sinner, other = start_child("peer", daemon, **SETTINGS), connect(daemon)
    lost = 0
    for number in range(6):
        given = sinner.do("reserve", seed=f"lost {number}", blocks=2, ttl_ms=1)
        lost += given["states"].count(m.BlockState.FRAME)
        wait_until(lambda: other.stats()["leases"]["write"] == 0, "its lease is over")
    assert lost == 4, "a mebibyte is four frames"
    press(other, FRAMES - 4)


def test_20_a_stopped_writer_cannot_take_the_whole_arena_along(
    start_daemon: Callable[..., Daemon], start_child: Callable[..., Child], connect: Callable[..., Peer]
) -> None:
    """Its leases expire, and its frames stay in quarantine for a process that may be stopped for ever."""
    daemon = start_daemon("--arena", "4MiB", "--region", "2MiB", "--quarantine-per-client", "1MiB")
    child, other = start_child("peer", daemon, **SETTINGS), connect(daemon)
    child.do("reserve", seed="all of it", blocks=FRAMES, ttl_ms=50)
    child.stop()
    wait_until(lambda: other.stats()["leases"]["write"] == 0, "its lease is over")
    press(other, FRAMES - 4)  # a mebibyte is four frames


def test_9_frames_in_quarantine_keep_their_old_bytes(small: Daemon, connect: Callable[..., Peer]) -> None:
    """What the writer reads back is what it wrote: no other client has written there meanwhile."""
    writer, other = connect(small), connect(small)
    keys = chain_of("mine", TAKEN)
    reserved = writer.reserve(SPEC, keys, ttl_ms=50)
    writer.fill(SPEC, keys, reserved)
    wait_until(lambda: other.stats()["leases"]["quarantined"] == 1, "the lease is over")
    press(other, FRAMES - TAKEN)
    for number, frame in enumerate(m.unpack_frames(reserved.frames)):
        assert writer.read(frame, SPEC.block_bytes) == content(key_of(keys, number), SPEC)
