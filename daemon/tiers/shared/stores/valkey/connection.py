"""The calls of the tier, and a connection to one server."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiercache.daemon.tiers.shared.stores.store import (
    MAX_NOTE_BYTES,
    Arrived,
    Exists,
    Fate,
    Get,
    Noted,
    NotReplicated,
    Put,
    StoreError,
    StoreProblem,
)

from .commands import (
    MOST_VALUE_BYTES,
    CountReplicas,
    ExistsKey,
    ExistsRun,
    GetNote,
    GetValue,
    KeepNote,
    MakeNote,
    PutValue,
    ReplaceNote,
    ReplicatedCommand,
    Simple,
    TouchNote,
    Unlink,
    ValkeyCommand,
)
from .exchange import READING, WRITING, Exchange, PipelineWindow
from .line import ValkeyLine
from .refusals import read_refusal
from .tls_line import TlsLine
from .url import Place, ValkeySettings

RUN_NAMES = 512
"""Names in one run: its requests are sent as one, and must leave room for others within the window."""
REPLICA_S = 1.0
"""How long a flush waits for the replicas of a server."""
COUNTED_S = 1.0
"""How long the number of a server's replicas is believed, while the line to it lasts."""
NOTE_TRIES = 4
"""How often to set a note that other clients delete at the same time."""


class ValkeyConnection(ABC):
    """What connections to one server and to a cluster have in common. See `Connection`.

    After `close` every call raises StoreError.
    """

    def __init__(self, settings: ValkeySettings) -> None:
        self._settings = settings
        self._deadline_s = 0.0
        self._lock = threading.Lock()  # of `_lines` and what `close` looks at
        self._lines: set[ValkeyLine] = set()
        self._replicas: dict[
            Place, tuple[int, float]
        ] = {}  # how many keep up with each server, and until when that holds
        self._busy = False
        self._closed = threading.Event()

    # --- the calls ---

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        """See `Connection`; so with all of these."""
        there = [False] * len(names)
        found: list[bytes | None] = [None] * len(notes)
        with self._call(deadline_s):
            self._run(_note_commands(notes, found), self._exists_commands(names, there), READING)
        return Exists(there, found)

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        for get in wanted:
            assert not get.ranged, "ranges are for stores with packs"
            get.fate = Fate.UNKNOWN
        found: list[bytes | None] = [None] * len(notes)
        told = noted is None

        def settled(get: Get) -> None:
            nonlocal told
            if noted is not None and not told:  # the replies come in order, those to the notes first
                told = True
                noted(found)
            if arrived is not None:
                arrived(get)

        with self._call(deadline_s):
            self._run(_note_commands(notes, found), [GetValue(get, settled) for get in wanted], READING)
        if noted is not None and not told:
            noted(found)
        return found

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(notes)
        commands = []
        for put in values:
            put.fate = Fate.UNKNOWN
            if sum(memoryview(part).nbytes for part in put.parts) > MOST_VALUE_BYTES:
                put.fate = Fate.REFUSED
            else:
                commands.append(PutValue(put))
        with self._call(deadline_s):
            self._run(_note_commands(notes, found), commands, WRITING)
        return found

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        with self._call(deadline_s):
            self._run_replicated(*[Unlink(name) for name in names])

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        assert len(value) <= MAX_NOTE_BYTES, "a longer note would be taken as missing"
        with self._call(deadline_s):
            if not only_if_missing:
                self._run_replicated(ReplaceNote(name, value))
                return value
            for _ in range(NOTE_TRIES):
                found: list[bytes | None] = [None]
                making, getting = MakeNote(name, value), GetNote(name, found, 0)
                self._run([], [making, getting], WRITING)
                if making.stored:
                    return value
                if found[0] is not None:
                    return found[0]
                if getting.too_long:
                    break
        text = "a note of ours is there and too long to be ours, or others delete it all the time"
        raise StoreError(StoreProblem.PROTOCOL, f"{self._settings.address}: {text}: delete it, or use another database")

    def replicated_note(self, name: bytes, deadline_s: float) -> bytes | None:
        keeping = KeepNote(name)
        with self._call(deadline_s):
            self._run_replicated(TouchNote(name), keeping)
        return keeping.note

    def _run_replicated(self, *commands: ValkeyCommand) -> None:
        """Run them, and wait until the replicas that keep up have what they did. Raises StoreError if one has not.

        A replica that becomes the primary without that would bring back what was flushed.
        """
        self._run([], commands, WRITING)
        for command in commands:
            if isinstance(command, ReplicatedCommand) and command.acked < command.replicas:
                late = f"{command.replicas - command.acked} of {command.replicas} replicas"
                text = f"{self._settings.address}: {late} have not taken a flush in {command.wait_s:.1f} s"
                if command.wait_s < REPLICA_S:  # the deadline is near: that says nothing about them
                    raise StoreError(StoreProblem.TIMEOUT, text)
                raise NotReplicated(StoreProblem.BUSY, text)

    def _await_replicas(self, place: Place, commands: Sequence[ValkeyCommand]) -> None:
        """Let those of these commands that must reach replicas wait for those of the server that they are sent to."""
        replicated = [command for command in commands if isinstance(command, ReplicatedCommand)]
        if not replicated:
            return
        count, until_s = self._replicas.get(place, (0, 0.0))
        if time.monotonic() >= until_s:
            counting = CountReplicas()
            self._ask(place, counting)
            count = counting.count
            self._replicas[place] = count, time.monotonic() + COUNTED_S
        wait_s = min(REPLICA_S, (self._deadline_s - time.monotonic()) / 2)
        for command in replicated:
            command.await_replicas(count, wait_s)

    def close(self) -> None:
        """End it for good, from any thread. A call under way ends at once."""
        with self._lock:
            self._closed.set()
            for line in self._lines:
                line.shutdown()
            if not self._busy:
                self._drop_all()

    # --- how they run ---

    @abstractmethod
    def _run(self, notes: list[ValkeyCommand], commands: Sequence[ValkeyCommand], window: PipelineWindow) -> None:
        """Read the notes, then run the commands. Raises StoreError."""

    @abstractmethod
    def _ask(self, place: Place, command: ValkeyCommand) -> None:
        """Run a command at this server. Raises StoreError."""

    def _exists_commands(self, names: Sequence[bytes], there: list[bool]) -> list[ValkeyCommand]:
        """What asks for these names, and sets their places in `there`."""
        return [ExistsKey(name, there, place) for place, name in enumerate(names)]

    @contextmanager
    def _call(self, deadline_s: float) -> Iterator[None]:
        """What surrounds each call: after a failure no line is left that could have a late reply."""
        with self._lock:
            assert not self._busy, "one thread uses a connection at a time"
            if self._closed.is_set():
                raise StoreError(StoreProblem.UNREACHABLE, f"{self._settings.address}: the connection was closed")
            self._busy = True
        self._deadline_s = deadline_s
        try:
            if time.monotonic() >= deadline_s:
                text = f"{self._settings.address}: the deadline had passed before the call"
                raise StoreError(StoreProblem.TIMEOUT, text)
            yield
        except StoreError:
            raise  # `_run` has closed the lines that failed
        except BaseException:
            with self._lock:
                self._drop_all()
            raise
        finally:
            with self._lock:
                self._busy = False
                if self._closed.is_set():
                    self._drop_all()

    def _drop_all(self) -> None:
        for line in self._lines:
            line.close()
        self._lines.clear()
        self._replicas.clear()

    def _drop(self, line: ValkeyLine) -> None:
        with self._lock:
            self._lines.discard(line)
            line.close()
            self._replicas.pop(line.place, None)

    def _ready(self, line: ValkeyLine | None) -> ValkeyLine | None:
        """This line, if the next call can use it: open, and with nothing to read."""
        if line is None or line not in self._lines:
            return None
        if line.quiet:
            line.deadline_s = self._deadline_s
            return line
        self._drop(line)
        return None

    def _open(self, place: Place, deadline_s: float) -> ValkeyLine:
        """A new line, with user, password and database told. Raises StoreError."""
        settings = self._settings
        line = ValkeyLine(place) if settings.tls is None else TlsLine(place, settings.tls)
        line.deadline_s = deadline_s
        with self._lock:
            self._lines.add(line)
            if self._closed.is_set():
                line.shutdown()
        try:
            line.open()
            if settings.password:
                words = (b"AUTH", settings.user, settings.password) if settings.user else (b"AUTH", settings.password)
                text = "it rejects our user or password: check them in the store's URL"
                _greet(line, Simple(*words), StoreProblem.DENIED, text)
            if settings.database:
                text = "it rejects the database's number: choose one that it has"
                _greet(line, Simple(b"SELECT", b"%d" % settings.database), StoreProblem.PROTOCOL, text)
        except BaseException:
            self._drop(line)
            raise
        line.deadline_s = self._deadline_s
        return line


class OneServer(ValkeyConnection):
    """A connection to one server."""

    def __init__(self, settings: ValkeySettings) -> None:
        super().__init__(settings)
        self._line: ValkeyLine | None = None

    def _exists_commands(self, names: Sequence[bytes], there: list[bool]) -> list[ValkeyCommand]:
        starts = range(0, len(names), RUN_NAMES)
        return [ExistsRun(names[start : start + RUN_NAMES], there, start) for start in starts]

    def _run(self, notes: list[ValkeyCommand], commands: Sequence[ValkeyCommand], window: PipelineWindow) -> None:
        self._await_replicas(self._settings.places[0], commands)
        self._exchange([*notes, *commands], window)

    def _ask(self, place: Place, command: ValkeyCommand) -> None:
        self._exchange([command], READING)

    def _exchange(self, commands: Sequence[ValkeyCommand], window: PipelineWindow) -> None:
        line = self._line = self._ready(self._line) or self._open(self._settings.places[0], self._deadline_s)
        exchange = Exchange(line, commands, window)
        try:
            exchange.run()
        except StoreError as error:
            problem = exchange.problem or error
            if error is not exchange.problem or problem.problem in OPENED_ANEW:
                self._drop(line)
            raise problem from None


OPENED_ANEW = (StoreProblem.DENIED, StoreProblem.READ_ONLY)
"""Answers after which the connection is opened again: with our password, to what is the primary then."""


def _note_commands(names: Sequence[bytes], found: list[bytes | None]) -> list[ValkeyCommand]:
    return [GetNote(name, found, place) for place, name in enumerate(names)]


def _greet(line: ValkeyLine, command: Simple, problem: StoreProblem, text: str) -> None:
    """Run AUTH or SELECT. Of a refusal only the code is told: its text may repeat the password."""
    line.send(command.request)
    first = line.read_line()
    if first[:1] != b"-":
        command.read(first, line)
        return
    refusal = read_refusal(first)
    if refusal.problem is StoreProblem.BUSY:
        raise StoreError(StoreProblem.BUSY, f"{line.place}: it takes no connections now ({refusal.code})")
    raise StoreError(problem, f"{line.place}: {text} ({refusal.code})")
