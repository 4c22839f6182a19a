"""Hosts that share a store: good or a miss, and nothing that was flushed, whatever happens to the store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fleet import BLOCKS, CHAINS, SPACES, Hosts
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from machines import in_first_ring, in_stress

HOSTS = st.integers(0, 3)
NAMES = st.sampled_from(sorted(CHAINS))
LENGTHS = st.integers(1, BLOCKS)
SOME_SPACES = st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
TROUBLES = st.sampled_from(["away", "full", "read only", "no answer"])


class Fleet(Hosts):
    """The store evicts, forgets, is away, is full, is spoilt, and loses answers."""

    @initialize(
        modes=st.lists(st.sampled_from(["all", "all", "evicted", "reused"]), min_size=2, max_size=3),
        sealed=st.booleans(),
        pack=st.sampled_from([1, 1, 2]),
    )
    def open_all(self, modes: list[str], sealed: bool, pack: int) -> None:
        self.open(modes, sealed, pack)

    @rule(
        at=st.integers(0, 9),
        what=st.sampled_from(["flush", "load", "send", "store", "evict", "lose notes", "trouble"]),
        host=HOSTS,
        name=NAMES,
        spaces=SOME_SPACES,
    )
    def plan(self, at: int, what: str, host: int, name: str, spaces: tuple[int, ...]) -> None:
        """What will happen in the midst of one of the next steps."""
        actions: dict[str, Callable[[], object]] = {
            "flush": partial(self.host_flushes, host, spaces, "", 0, "all", 0),
            "load": partial(self.host_loads, host, spaces, name, BLOCKS),
            "send": partial(self.host_sends, host),
            "store": partial(self.host_stores, host, spaces[0], name, BLOCKS),
            "evict": lambda: self.store_of_all.values.clear(),
            "lose notes": lambda: self.store_of_all.notes.clear(),
            "trouble": partial(setattr, self, "trouble", "no answer"),
        }
        self.meanwhile = (at, actions[what])

    @rule(trouble=TROUBLES)
    def fail(self, trouble: str) -> None:
        """During the next step."""
        self.trouble, self.steps = trouble, 0

    @rule(numbers=st.sets(st.integers(0, 40), min_size=1, max_size=10), spoil=st.sampled_from(["lose", "swap", "cut"]))
    def lose_values(self, numbers: set[int], spoil: str) -> None:
        """It evicts some values, or returns others in their place."""
        values = self.store_of_all.values
        names = [name for number, name in enumerate(values) if number in numbers]
        for name, other in zip(names, [*names[1:], *names[:1]], strict=True):
            if spoil == "lose":
                del values[name]
            else:
                values[name] = values[other] if spoil == "swap" else values[name][:-1]

    @rule(notes=st.sampled_from(["all", "one", "empty", "none"]), values=st.booleans())
    def forget(self, notes: str, values: bool) -> None:
        """Others empty it, or it evicts notes."""
        if values:
            self.store_of_all.values.clear()
        if notes == "all":
            self.store_of_all.notes.clear()
        elif notes == "empty":  # as of hosts that ended while they made them
            self.store_of_all.notes.update(dict.fromkeys(self.store_of_all.notes, b""))
        elif notes == "one" and self.store_of_all.notes:
            del self.store_of_all.notes[min(self.store_of_all.notes, key=len)]

    @rule(seconds=st.sampled_from([0.5, 2.0, 12.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)
        for rig in self.hosts:
            self.act(rig.cache.work)

    @rule(host=HOSTS, space=st.integers(0, SPACES - 1), name=NAMES, blocks=LENGTHS)
    def store(self, host: int, space: int, name: str, blocks: int) -> None:
        self.host_stores(host, space, name, blocks)

    @rule(host=HOSTS, jobs=st.integers(0, 3))
    def some_work(self, host: int, jobs: int) -> None:
        """Some blocks may be on their way to the store after this, and wait for a line."""
        rig = self.rig(host)
        self.act(rig.cache.work)
        for _ in range(jobs):
            self.step(rig)

    @rule(host=HOSTS)
    def send(self, host: int) -> None:
        self.host_sends(host)

    @rule(host=HOSTS, spaces=SOME_SPACES, name=NAMES, blocks=LENGTHS)
    def load(self, host: int, spaces: tuple[int, ...], name: str, blocks: int) -> None:
        self.host_loads(host, spaces, name, blocks)

    @rule(
        host=HOSTS,
        spaces=st.one_of(st.just(()), SOME_SPACES),
        name=st.sampled_from(["", "", *CHAINS]),
        number=st.integers(0, BLOCKS - 1),
        tier=st.sampled_from(["all", "all", "all", "shared"]),
        busy=st.integers(0, 3),
    )
    def flush(self, host: int, spaces: tuple[int, ...], name: str, number: int, tier: str, busy: int) -> None:
        self.host_flushes(host, spaces, name, number, tier, busy)

    @rule(busy=st.integers(0, 3))
    def flush_everywhere(self, busy: int) -> None:
        """To be rid of something for good."""
        self.meanwhile = None
        for host in range(len(self.hosts)):
            self.host_flushes(host, (), "", 0, "all", busy)
        if self.trouble == "works" and not any(rig.shared.flushes.waiting for rig in self.hosts):
            assert not any(copy.hosts or copy.stored for copy in self.copies)

    @rule(host=HOSTS)
    def restart(self, host: int) -> None:
        host %= len(self.hosts)
        self.meanwhile = None
        self.loop.run_until_complete(self.hosts[host].close(0.0))
        self.unanswered = [one for one in self.unanswered if one[1] != host]
        for copy in self.copies:
            copy.hosts.discard(host)
        self.hosts[host] = self.host(host)

    @rule()
    def all_is_well_again(self) -> None:
        """The store works: hosts use it again, flushes reach it, nothing is held, and a new prompt is shared by all."""
        self.trouble, self.meanwhile = "works", None
        self.pass_time(700.0)
        for rig in self.hosts:
            self.drive(rig, lambda rig=rig: self.is_idle(rig))  # type: ignore[misc]
        self.told()
        assert not self.unanswered
        for host, rig in enumerate(self.hosts):
            self.host_flushes(host, (), "", 0, "all", 0)
            rig.check_end()
        assert self.copies == []
        self.pass_time(20.0)  # what could not be fetched is asked for again
        self.host_stores(0, 0, "x", BLOCKS)
        if self.modes[0] == "all":
            self.drive(self.hosts[0], lambda: self.is_idle(self.hosts[0]))
            for host in range(1, len(self.hosts)):
                assert self.host_loads(host, (0,), "x", BLOCKS) == BLOCKS

    @rule(
        host=HOSTS,
        other=HOSTS,
        spaces=SOME_SPACES,
        tier=st.sampled_from(["all", "all", "shared"]),
        busy=st.integers(0, 2),
    )
    def reuse(self, host: int, other: int, spaces: tuple[int, ...], tier: str, busy: int) -> None:
        """A prompt's life: stored, maybe sent or evicted, flushed, stored again, and asked for on both hosts."""
        self.host_stores_all(host, spaces, "x")
        for _ in range(busy):
            self.act(self.rig(host).cache.work)
            self.step(self.rig(host))
        if busy == 2:
            self.host_loads(other, spaces, "x", BLOCKS)
        if busy != 1:
            self.host_stores_all(host, (0, 1, 2), "y")
        self.host_flushes(host, (), "", 0, tier, busy)
        self.host_sends(host)
        self.pass_time(15.0)  # what was believed of the store, or could not be fetched, is asked for again
        self.host_loads(other, spaces, "x", BLOCKS)
        self.host_stores_all(host, spaces, "x")
        self.host_sends(host)
        self.host_loads(other, spaces, "x", BLOCKS)


TestFleet = in_first_ring(Fleet, examples=60, steps=40)
TestFleetForLong = in_stress(Fleet)
