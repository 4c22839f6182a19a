"""A connection to a cluster: a line to each node that we need.

    commands ─► by the owner of their slot ─► an Exchange with each node, all at once
                        ▲                                  │
                        └──── MOVED and ASK, a few times ◄─┘

Notes are read first and by themselves: other nodes must not read their values before.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem
from tiercache.daemon.tiers.shared.stores.valkey.commands import Simple, ValkeyCommand
from tiercache.daemon.tiers.shared.stores.valkey.connection import OPENED_ANEW, ValkeyConnection
from tiercache.daemon.tiers.shared.stores.valkey.exchange import READING, Exchange, PipelineWindow
from tiercache.daemon.tiers.shared.stores.valkey.line import ValkeyLine
from tiercache.daemon.tiers.shared.stores.valkey.slots import ask_slots, hash_slot_of
from tiercache.daemon.tiers.shared.stores.valkey.url import Place, ValkeySettings

MOST_REDIRECTS = 5
"""How often the commands of one call are sent on to other nodes."""
MOST_NODES = 128
"""A connection has at most so many lines: a server could name a new node with each redirect."""

Queues = dict[Place, list[ValkeyCommand]]


class Cluster(ValkeyConnection):
    """A connection to a cluster. See `store.Connection`."""

    def __init__(self, settings: ValkeySettings) -> None:
        super().__init__(settings)
        self._owners: list[Place | None] = []
        """Of each slot; empty: to be asked for."""
        self._moved = False
        """Slots have moved since."""
        self._nodes: dict[Place, ValkeyLine] = {}

    def _run(self, notes: list[ValkeyCommand], commands: Sequence[ValkeyCommand], window: PipelineWindow) -> None:
        if not self._owners or self._moved:
            self._learn()
        try:
            for batch in (notes, commands):
                self._run_batch(batch, window)
        except StoreError:
            self._owners = []  # a node that fails may have been replaced
            raise

    def _run_batch(self, commands: Sequence[ValkeyCommand], window: PipelineWindow) -> None:
        queues: Queues = {}
        for command in commands:
            queues.setdefault(self._owner(hash_slot_of(command.name)), []).append(command)
        for _ in range(1 + MOST_REDIRECTS):
            if not queues:
                return
            for place, queue in queues.items():
                self._await_replicas(place, queue)
            queues = self._exchange(queues, window)
        raise StoreError(StoreProblem.BUSY, f"{self._settings.address}: its slots keep moving")

    def _ask(self, place: Place, command: ValkeyCommand) -> None:
        self._exchange({place: [command]}, READING)

    def _owner(self, slot: int) -> Place:
        place = self._owners[slot]
        if place is None:
            text = f"{self._settings.address}: no node of the cluster serves the slot {slot}"
            raise StoreError(StoreProblem.BUSY, text)
        return place

    # --- one round ---

    def _exchange(self, queues: Queues, window: PipelineWindow) -> Queues:
        """Run commands at their nodes; what they send elsewhere.

        A node that fails keeps none of the others from finishing. Raises StoreError, the first one.
        """
        errors: list[StoreError] = []
        exchanges: list[Exchange] = []
        places = sorted(queues, key=lambda place: place not in self._nodes)  # a node that is not there may take long
        for number, place in enumerate(places):
            try:
                line = self._line(place, self._share_s(1 + len(places) - number))
                exchange = Exchange(line, queues[place], window, follow=True)
                exchange.send()
                exchanges.append(exchange)
            except StoreError as error:
                errors.append(error)
                self._forget(place)
        running = list(exchanges)
        while running:
            for exchange in self._await(running):
                try:
                    exchange.settle()
                    exchange.send()
                except StoreError as error:
                    errors.append(exchange.problem or error)
                    self._forget(exchange.line.place)
                    running.remove(exchange)
                else:
                    if not exchange.under_way:
                        running.remove(exchange)
        problems = [exchange.problem for exchange in exchanges if exchange.problem is not None]
        for exchange in exchanges:
            if exchange.problem is not None and exchange.problem.problem in OPENED_ANEW:
                self._forget(exchange.line.place)
        if errors or problems:
            raise (errors + problems)[0]
        return self._elsewhere(exchanges)

    def _await(self, running: list[Exchange]) -> list[Exchange]:
        """Those whose reply has begun to come; all of them at the deadline, so that each one fails by itself."""
        if len(running) == 1:
            return list(running)
        ready = [exchange for exchange in running if exchange.line.has_more]
        others = {exchange.line.fileno(): exchange for exchange in running if not exchange.line.has_more}
        poll = select.poll()
        for number in others:
            poll.register(number, select.POLLIN)
        left_ms = max(0.0, self._deadline_s - time.monotonic()) * 1000 + 1
        events = poll.poll(0 if ready else left_ms)
        return ready + [others[number] for number, _ in events] or list(running)

    def _elsewhere(self, exchanges: list[Exchange]) -> Queues:
        queues: Queues = {}
        for exchange in exchanges:
            for command, redirect in exchange.redirected:
                place = Place(redirect.host or exchange.line.place.host, redirect.port)
                queue = queues.setdefault(place, [])
                if redirect.asking:
                    queue.append(Simple(b"ASKING"))
                else:
                    self._owners[redirect.slot] = place
                    self._moved = True
                queue.append(command)
        return queues

    # --- nodes ---

    def _share_s(self, count: int) -> float:
        """The deadline of the first of so many steps, of which none should keep the others from their turn."""
        now_s = time.monotonic()
        return now_s + (self._deadline_s - now_s) / count

    def _line(self, place: Place, deadline_s: float) -> ValkeyLine:
        """The line to a node, opened before a deadline if it has to be. Raises StoreError."""
        line = self._ready(self._nodes.get(place))
        if line is None:
            if len(self._nodes) >= MOST_NODES:
                text = f"{self._settings.address}: it names more than {MOST_NODES} nodes"
                raise StoreError(StoreProblem.PROTOCOL, text)
            line = self._nodes[place] = self._open(place, deadline_s)
        return line

    def _forget(self, place: Place) -> None:
        line = self._nodes.pop(place, None)
        if line is not None:
            self._drop(line)

    def _learn(self) -> None:
        """Ask the nodes that we know, and those in the URL, until one tells its slots. Raises StoreError."""
        places = list(dict.fromkeys([*self._nodes, *self._settings.places]))
        for number, place in enumerate(places):
            share_s = self._share_s(len(places) - number)
            try:
                line = self._line(place, share_s)
                line.deadline_s = share_s
                self._owners = ask_slots(line)
            except StoreError:
                self._forget(place)
                if number + 1 == len(places):
                    raise
            else:
                line.deadline_s = self._deadline_s
                self._moved = False
                break
        for place in set(self._nodes) - set(self._owners):
            self._forget(place)
