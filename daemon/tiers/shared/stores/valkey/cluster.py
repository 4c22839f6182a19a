"""A connection to a cluster: a line to each node that we need.

    commands ─► by the owner of their slot ─► an Exchange with each node, all at once
                        ▲                                  │
                        └──── MOVED and ASK, a few times ◄─┘

Notes are read first and by themselves: other nodes must not read their values before.
"""

from __future__ import annotations

import select
import time
from binascii import crc_hqx
from collections.abc import Sequence

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

from .commands import Simple, ValkeyCommand, written
from .connection import OPENED_ANEW, ValkeyConnection
from .exchange import READING, Exchange, PipelineWindow
from .line import ValkeyLine
from .refusals import SLOTS, read_refusal
from .url import Place, ValkeySettings, is_host

MOST_REDIRECTS = 5
"""How often the commands of one call are sent on to other nodes."""
MOST_NODES = 128
"""The most lines of a connection: a server could name a new node with each redirect."""

Queues = dict[Place, list[ValkeyCommand]]


MOST_BYTES = 32 << 20
"""Memory that one answer may take: enough for 16,384 ranges with their nodes, and some more."""
ITEM_BYTES = 64
"""What each number, text or list counts for, besides the bytes of the text."""
MOST_DEPTH = 5
MOST_TEXT_BYTES = 4096

Reply = bytes | int | None | list["Reply"]


def hash_slot_of(name: bytes) -> int:
    """The slot of a name."""
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start + 1)
        if end > start + 1:
            name = name[start + 1 : end]
    return crc_hqx(name, 0) % SLOTS


def ask_slots(line: ValkeyLine) -> list[Place | None]:
    """The primary of each slot, as this node sees it; None: no node serves it. Raises StoreError."""
    line.send([written(b"CLUSTER", b"SLOTS")])
    first = line.read_line()
    if first[:1] == b"-":
        refusal = read_refusal(first)
        problem = refusal.problem
        if problem is not None:
            raise refusal.error(str(line.place), problem)
        raise line.breach(f"it does not tell the cluster's slots ({refusal}): without a cluster, write valkey://")
    reply = _Reader(line).read(first)
    owners: list[Place | None] = [None] * SLOTS
    if not isinstance(reply, list):
        raise line.breach("it did not answer CLUSTER SLOTS with a list")
    told = 0
    for entry in reply:
        if not (isinstance(entry, list) and len(entry) >= 3 and isinstance(entry[2], list) and len(entry[2]) >= 2):
            raise line.breach("it did not answer CLUSTER SLOTS with ranges of slots")
        low, high = entry[:2]
        host, port = entry[2][:2]
        if not (isinstance(low, int) and isinstance(high, int) and 0 <= low <= high < SLOTS):
            raise line.breach("it told slots that there are not")
        told += high + 1 - low
        if told > SLOTS:  # all work on them is bounded by that
            raise line.breach("it told of two nodes for one slot")
        owners[low : high + 1] = [_place(line, host, port)] * (high + 1 - low)
    return owners


def _place(line: ValkeyLine, host: Reply, port: Reply) -> Place:
    """A node's place. A node that does not know its own host is at the place that was asked."""
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else ""
    if text in ("", "?"):
        text = line.place.host
    if not is_host(text) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise line.breach("it told a node's address that is none")
    return Place(text, port)


class _Reader:
    """Reads lists of lists of texts and numbers."""

    def __init__(self, line: ValkeyLine) -> None:
        self._line = line
        self._left = MOST_BYTES

    def read(self, first: bytes, depth: int = 0) -> Reply:
        """The reply that begins with this line."""
        kind, digits = first[:1], first[1:]
        if kind == b"+":
            return digits
        if digits == b"-1" and kind in (b"$", b"*"):
            return None
        if not digits.isdigit() or len(digits) > 9:
            raise self._line.breach("its answer about the cluster is not RESP2")
        number = int(digits)
        if kind == b":":
            return number
        if kind == b"$" and number <= MOST_TEXT_BYTES:
            self._left -= number
            text = bytearray(number)
            self._line.read_value((memoryview(text),))
            return bytes(text)
        self._left -= number * ITEM_BYTES
        if kind != b"*" or self._left < 0 or depth >= MOST_DEPTH:
            raise self._line.breach("its answer about the cluster is not RESP2, or too long")
        return [self.read(self._line.read_line(), depth + 1) for _ in range(number)]


class Cluster(ValkeyConnection):
    """A connection to a cluster. See `Connection`."""

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
        """The deadline of the first of these steps, none of which should keep the others from their turn."""
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
