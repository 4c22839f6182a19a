"""Several hosts in one replay: requests are spread over them, each has its own tiers, and they may share a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Protocol

from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.requests import TraceRequest
from tiercache.replay.simulation import Outcome, Tallies

MAX_HOSTS = 1024
ENOUGH = 0.5
"""The part of a prompt that a host must have been given before, for the prompt to go there."""


class HostCache(Protocol):
    """The cache of one host; see `played.PlayedCache`."""

    def declare(self, number: int, spec: NamespaceSpec) -> None: ...

    def play(self, request: TraceRequest) -> Outcome: ...

    def tallies(self) -> Tallies: ...


class RoundRobin:
    """Each host in turn."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._next = 0

    def choose(self, request: TraceRequest) -> int:
        """The host for a prompt."""
        chosen, self._next = self._next, (self._next + 1) % self._hosts
        return chosen


class ByPrefix:
    """The host that was given at least half of the prompt before, else the one that was given the fewest blocks.

    Routers that know prefixes do it about so. They know what hosts were sent, not what hosts still have.
    """

    def __init__(self, hosts: int) -> None:
        self._given = [0] * hosts
        self._host_of: dict[bytes, int] = {}

    def choose(self, request: TraceRequest) -> int:
        """The host for a prompt."""
        keys, host_of = request.keys, self._host_of
        chain = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        known = next((end for end in range(len(chain), 0, -1) if chain[end - 1] in host_of), 0)
        if known and known >= ENOUGH * len(chain):
            chosen = host_of[chain[known - 1]]
        else:
            chosen = min(range(len(self._given)), key=self._given.__getitem__)
        self._given[chosen] += len(chain) - known
        host_of.update(dict.fromkeys(chain, chosen))
        return chosen


SPREADS: Mapping[str, Callable[[int], RoundRobin | ByPrefix]] = {"round-robin": RoundRobin, "prefix": ByPrefix}


class Hosts:
    """Plays each request on one of the hosts. Implements `PlayedCache`."""

    def __init__(self, hosts: Sequence[HostCache], spread: str) -> None:
        self._hosts = hosts
        self._spread = SPREADS[spread](len(hosts))

    def declare(self, number: int, spec: NamespaceSpec) -> None:
        """See `PlayedCache`."""
        for host in self._hosts:
            host.declare(number, spec)

    def play(self, request: TraceRequest) -> Outcome:
        """See `PlayedCache`."""
        chosen = self._spread.choose(request)
        return self._hosts[chosen].play(request)._replace(host=chosen)

    def tallies(self) -> Tallies:
        """Those of all hosts together."""
        each = [host.tallies() for host in self._hosts]
        return Tallies(**{one.name: sum(getattr(host, one.name) for host in each) for one in fields(Tallies)})
