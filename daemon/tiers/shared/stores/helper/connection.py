"""The store's calls, as messages to a worker of the helper process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tiercache.daemon.helper_processes.process import HelperProcess
from tiercache.daemon.tiers.shared.stores.store import Arrived, Exists, Fate, Get, Noted, Put, StoreError, StoreProblem

from . import messages
from .lines import LineLost, WorkerLine
from .supervisor import StoreSupervisor

T = TypeVar("T", Get, Put)


class HelperConnection:
    """`Connection` by way of a helper process. A call that is late costs its line; the next one gets another."""

    def __init__(self, supervisor: StoreSupervisor) -> None:
        self._supervisor = supervisor
        self._calling = threading.Lock()
        self._process: HelperProcess | None = None
        self._line: WorkerLine | None = None
        self._closed = threading.Event()

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        with self._call(deadline_s) as call:
            found, rest = call.notes_before(notes)
            there: list[bool] = []
            for some in _portions(names):
                answer = call.look(some, rest)
                found, rest, there = found + answer.notes, [], there + answer.there
            return Exists(there, found)

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        def ask(some: list[tuple[int, Get]], notes: list[bytes]) -> None:
            items = [
                messages.ReadItem(slot, get.name, get.offset, len(get.head) + len(get.body), get.ttl_s, get.ranged)
                for slot, get in some
            ]
            call.ask(messages.Read(items, notes, deadline_s))

        def settle(get: Get, answer: messages.Settled) -> None:
            get.fate = answer.fate
            if get.fate is Fate.DONE:
                rest = answer.length - len(get.head)
                if 0 <= rest <= len(get.body):
                    call.line.empty(answer.slot, [get.head, get.body[:rest]])
                    get.body_bytes = rest
                else:
                    get.fate = Fate.MISFIT
            if arrived is not None and get.fate is not Fate.UNKNOWN:
                arrived(get)

        with self._call(deadline_s) as call:
            call.line.make_room(max((len(get.head) + len(get.body) for get in wanted), default=0), deadline_s)
            return call.transfer(wanted, notes, ask, settle, together=call.line.slots, noted=noted)

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        def ask(some: list[tuple[int, Put]], notes: list[bytes]) -> None:
            items = [
                messages.WriteItem(slot, put.name, call.line.fill(slot, put.parts), put.ttl_s) for slot, put in some
            ]
            call.ask(messages.Write(items, notes, deadline_s))

        def settle(put: Put, answer: messages.Settled) -> None:
            put.fate = answer.fate

        with self._call(deadline_s) as call:
            call.line.make_room(max((sum(map(len, put.parts)) for put in values), default=0), deadline_s)
            # One value is written while the next one is copied.
            return call.transfer(values, notes, ask, settle, together=1)

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        with self._call(deadline_s) as call:
            for some in _portions(names):
                call.ask(messages.Delete(some, deadline_s))
                call.done()

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        with self._call(deadline_s) as call:
            call.ask(messages.WriteNote(name, value, deadline_s, only_if_missing))
            notes = call.done()
            if len(notes) != 1 or notes[0] is None:
                raise LineLost
            return notes[0]

    def replicated_note(self, name: bytes, deadline_s: float) -> bytes | None:
        with self._call(deadline_s) as call:
            call.ask(messages.ReadReplicatedNote(name, deadline_s))
            notes = call.done()
            if len(notes) != 1:
                raise LineLost
            return notes[0]

    def close(self) -> None:
        """Let the worker go, and end a call under way in another thread."""
        self._closed.set()
        if self._calling.acquire(blocking=False):
            try:
                self._drop_line()
            finally:
                self._calling.release()
        elif line := self._line:
            line.interrupt()

    @contextmanager
    def _call(self, deadline_s: float) -> Iterator[_Call]:
        with self._calling:
            began_s = time.monotonic()
            if self._closed.is_set():
                raise StoreError(StoreProblem.UNREACHABLE, "the connection is closed")
            if self._process is None or self._line is None:
                self._process, self._line = self._supervisor.open_line(deadline_s)
            call = _Call(self._process, self._line, deadline_s)
            try:
                yield call
            except LineLost:
                call.under_way = 0
                self._drop_line()
                what = (
                    "the connection was closed" if self._closed.is_set() else "its helper process ended during the call"
                )
                raise StoreError(StoreProblem.UNREACHABLE, what) from None
            finally:
                if call.under_way:
                    self._supervisor.give_up(self._process, self._line, began_s)
                    self._process = self._line = None
                if self._closed.is_set():  # meanwhile, by another thread
                    self._drop_line()

    def _drop_line(self) -> None:
        if self._line is not None:
            self._line.close()
        self._process = self._line = None


class _Call:
    """One call of the store, which may be several messages. Methods raise StoreError and LineLost."""

    def __init__(self, process: HelperProcess, line: WorkerLine, deadline_s: float) -> None:
        self.line = line
        self.under_way = 0
        """Messages that are not answered yet. If there are any when the call ends, its line is given up."""
        self._process = process
        self._deadline_s = deadline_s

    def ask(self, asked: messages.Asked) -> None:
        self.line.send(asked, self._deadline_s)
        self.under_way += 1

    def next_answer(self) -> messages.Answered:
        answer = self.line.receive(self._deadline_s)
        self._process.answered_s = time.monotonic()
        if not isinstance(answer, (messages.Settled, messages.Notes)):
            self.under_way -= 1
        return answer

    def done(self) -> list[bytes | None]:
        """The end of the only message under way."""
        answer = self.next_answer()
        if isinstance(answer, messages.Failed):
            raise _failure(answer)
        if not isinstance(answer, messages.Done):
            raise LineLost
        return answer.notes

    def look(self, names: list[bytes], notes: list[bytes]) -> messages.FoundNames:
        self.ask(messages.FindNames(names, notes, self._deadline_s))
        answer = self.next_answer()
        if isinstance(answer, messages.Failed):
            raise _failure(answer)
        if not isinstance(answer, messages.FoundNames) or len(answer.there) != len(names):
            raise LineLost
        return answer

    def notes_before(self, notes: Sequence[bytes]) -> tuple[list[bytes | None], list[bytes]]:
        """Read what would be too much for the first message of a batch; the rest goes with that."""
        found: list[bytes | None] = []
        while len(notes) > messages.MAX_NOTES:
            found += self.look([], list(notes[: messages.MAX_NOTES])).notes
            notes = notes[messages.MAX_NOTES :]
        return found, list(notes)

    def transfer(
        self,
        values: Sequence[T],
        notes: Sequence[bytes],
        ask: Callable[[list[tuple[int, T]], list[bytes]], None],
        settle: Callable[[T, messages.Settled], None],
        together: int,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        """Move values through the slots. After a failure nothing more is asked, and what is under way is awaited."""
        found, rest = self.notes_before(notes)
        if not values:
            found += self.look([], rest).notes if rest else []
        if noted is not None and len(found) == len(notes):
            noted(found)
        if not values:
            return found
        waiting, free = deque(values), deque(range(self.line.slots))
        moving: dict[int, T] = {}
        failure: StoreError | None = None
        # Half of the slots at a time: while the worker fills one half the other is emptied.
        enough = max(together // 2, 1)
        while True:
            if waiting and len(free) >= min(enough, len(waiting)) and failure is None:
                some = [(free.popleft(), waiting.popleft()) for _ in range(min(len(waiting), len(free), together))]
                moving.update(some)
                ask(some, rest)
                rest = []
                continue
            if not self.under_way:
                break
            answer = self.next_answer()
            if isinstance(answer, messages.Settled) and answer.slot in moving:
                settle(moving.pop(answer.slot), answer)
                free.append(answer.slot)
            elif isinstance(answer, (messages.Done, messages.Notes)) and len(found) + len(answer.notes) <= len(notes):
                found += answer.notes
                if noted is not None and answer.notes:
                    noted(found)
            elif isinstance(answer, messages.Failed):
                failure = failure or _failure(answer)
            else:
                raise LineLost
        if failure is not None:
            raise failure
        return found


def _portions(names: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The names, as many at a time as fit a message; at least one portion."""
    some: list[bytes] = []
    size = 0
    for name in names:
        if size + len(name) > messages.MAX_NAMES_BYTES:
            yield some
            some, size = [], 0
        some.append(name)
        size += len(name) + 8
    yield some


def _failure(answer: messages.Failed) -> StoreError:
    return StoreError(answer.problem, answer.text)


# --- the store ---------------------------------------------------------------------------------------


class HelperStore:
    """`SharedStore` by way of a helper process.

    Args:
        maker: `module:function` that makes the store from its URL, called in the process. The store may have a method
            `run_beside`, which the process runs in a thread, with what it tells of trouble.
        url, address, connections, pack_blocks: of the store.
    """

    def __init__(self, maker: str, url: str, address: str, connections: int, pack_blocks: int = 1) -> None:
        self.address = address
        self.connections = connections
        self.pack_blocks = pack_blocks
        self.supervisor = StoreSupervisor(maker, url, address)

    def connect(self) -> HelperConnection:
        """A new connection. The process starts now, so that it is there for the first call."""
        with contextlib.suppress(StoreError):  # the first call tries again
            self.supervisor.begin()
        return HelperConnection(self.supervisor)

    @property
    def trouble(self) -> str:
        """See `SharedStore`."""
        return self.supervisor.processes.trouble

    def stats(self) -> dict[str, object]:
        """Counts and state of the process, as plain values."""
        return self.supervisor.stats()

    def close(self) -> None:
        """End the process. Blocks for two seconds at most; calls under way end as UNREACHABLE."""
        self.supervisor.close()
