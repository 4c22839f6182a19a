"""Unfinished writes: how much of the arena they may take, which client they count for, and what ends them."""

from __future__ import annotations

from cache_rig import FRAME_BYTES, CacheRig
from chains import chain_of

from tiercache.daemon.tiers.dram.leases import Owner
from tiercache.daemon.tiers.dram.write_lease import Reservation
from tiercache.protocol.messages import BlockState, CommitState

ARENA_FRAMES = 32
INSTANCE = bytes(16)
"""The instance under which the daemon itself writes; a client may claim the same."""


class Writers(CacheRig):
    """An arena of 32 frames of which a quarter stays readable, and who writes to it."""

    def __init__(self, quarantine_frames: int = ARENA_FRAMES) -> None:
        super().__init__(
            region_bytes=ARENA_FRAMES * FRAME_BYTES, quarantine_bytes=quarantine_frames * FRAME_BYTES, floor_share=0.25
        )
        self.namespace, self._chains = self.space(), 0

    def reserve(self, owner: Owner, blocks: int) -> Reservation:
        """Reserve a new chain of `blocks` blocks."""
        self._chains += 1
        return self.cache.reserve(owner, self.namespace, b"", chain_of(self._chains, blocks), 10.0)

    def frames(self, owner: Owner, blocks: int) -> int:
        """How many of `blocks` new blocks get frames."""
        got = self.reserve(owner, blocks)
        assert got.states == [BlockState.FRAME] * len(got.frames) + [BlockState.NONE] * (blocks - len(got.frames))
        self.check()
        return len(got.frames)


def party(name: str, session: int = 0, *, mapped: bool = True, internal: bool = False) -> Owner:
    return Owner(bytes([session]) * 16, party=name, mapped=mapped, internal=internal)


def test_one_process_has_its_limit_whatever_instances_it_names() -> None:
    w = Writers(quarantine_frames=5)
    assert [w.frames(party("a", session), 3) for session in range(4)] == [3, 2, 0, 0]
    assert w.frames(party("b"), 8) == 5


def test_one_process_leaves_half_of_the_arena_and_all_together_leave_a_quarter() -> None:
    w = Writers()
    assert [w.frames(party("a"), 20), w.frames(party("b"), 20)] == [16, 8]
    assert [w.frames(party("c"), 4), w.frames(party("c"), 4)] == [1, 0], "a client without frames gets one at a time"


def test_what_the_daemon_brings_up_is_under_no_limit() -> None:
    w = Writers(quarantine_frames=1)
    assert w.frames(party("", internal=True), ARENA_FRAMES) == ARENA_FRAMES
    assert w.cache.writes.unfinished.quarantined_bytes == 0


def test_health_names_the_client_that_leaves_much_unfinished() -> None:
    w = Writers()
    reasons = w.cache.writes.unfinished.reasons
    w.reserve(party("process 7"), 8)
    assert reasons() == [], "blocks that are still being written do no harm"
    w.now_s += 11
    w.cache.expire()
    text = "32.0 KiB of the arena wait in quarantine for process 7, which does not finish its stores: restart it"
    assert reasons() == [text]


def test_a_client_that_calls_itself_like_the_daemon_does_not_reach_its_leases() -> None:
    w = Writers()
    daemon, client = Owner(INSTANCE, internal=True), Owner(INSTANCE)
    lease = w.reserve(daemon, 3).lease_id
    assert w.cache.writes.commit(client, lease, [0, 1, 2]) == [CommitState.DROPPED] * 3
    assert w.cache.writes.writable_block(client, lease, 0) is None
    w.cache.writes.abort(client, lease, finished=True)
    w.cache.writes.fail(client, lease, 0)
    assert w.cache.writes.commit(daemon, lease, [0, 1, 2]) == [CommitState.VISIBLE] * 3
    w.check()
