"""The few commands that we use: how each is written, and how its reply is read.

A reply begins with a line. `+OK`, `:1` and `-ERR …` are whole; `$5` says that five bytes and a line's end follow, and
`$-1` that there is no value (RESP2). What does not fit the command that it answers breaks the protocol: then the
place in the stream is lost, and the line is closed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tiercache.daemon.tiers.shared.stores.store import MAX_NOTE_BYTES, Arrived, Fate, Get, Put

from .line import Part, ValkeyLine
from .refusals import Refusal

MOST_SKIPPED_BYTES = 1 << 20
"""Bytes by which a value may be too long: they are read and dropped. A longer one ends the connection."""
MOST_VALUE_BYTES = 512 << 20
"""The longest value that Valkey and Redis take."""
_SHORT_REPLY_BYTES = 5
TOUCHED_S = 3600.0
"""The lifetime of a note between two commands that are sent as one."""
MAX_LAG_S = 10
"""A replica that has said nothing for longer is not waited for: it may only read, and never say what it has."""


def written(*words: bytes) -> bytes:
    """A command of short words."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _life_ms(seconds: float) -> bytes:
    return b"%d" % max(1, int(seconds * 1000))


class ValkeyCommand(ABC):
    """One command, and what its reply settles."""

    __slots__ = ("name", "replies", "reply_bytes", "request", "request_bytes")

    def __init__(self, name: bytes, request: Sequence[Part], request_bytes: int, reply_bytes: int) -> None:
        self.name = name
        self.request = request
        self.request_bytes = request_bytes
        self.reply_bytes = reply_bytes
        """How many are expected of its replies."""
        self.replies = 1
        """How many replies come: more than one for several commands that are sent as one."""

    def read_ahead(self, line: ValkeyLine, due: int) -> int:
        """Settle replies that were read ahead, up to those that are due, if this command can do so; how many."""
        return 0

    @abstractmethod
    def read(self, first: bytes, line: ValkeyLine) -> None:
        """Read the rest of a reply that begins with this line, and is no error. Raises StoreError."""

    def refuse(self, denied: bool) -> bool:
        """The server answered with an error that is about this command alone; `denied`: this user may not run it.

        False: the call must fail.
        """
        return False

    def passes_over(self, refusal: Refusal) -> bool:
        """The server answered with an error of any kind; True if the command needs no better answer."""
        return False


class ShortCommand(ValkeyCommand):
    """A command whose request has no long part."""

    __slots__ = ()

    def __init__(self, name: bytes, request: bytes, reply_bytes: int = _SHORT_REPLY_BYTES) -> None:
        super().__init__(name, (request,), len(request), reply_bytes)


class Simple(ShortCommand):
    """One whose reply is a line that we know: AUTH, SELECT, ASKING."""

    __slots__ = ()

    def __init__(self, *words: bytes) -> None:
        super().__init__(b"", written(*words))

    def read(self, first: bytes, line: ValkeyLine) -> None:
        if first != b"+OK":
            raise line.breach("it did not answer OK")


class GetValue(ShortCommand):
    """GET of a value, into the caller's memory; GETEX where its lifetime is renewed (since Redis 6.2)."""

    __slots__ = ("_arrived", "_get")

    def __init__(self, get: Get, arrived: Arrived | None) -> None:
        words: tuple[bytes, ...] = (b"GET", get.name)
        if get.ttl_s > 0:
            words = (b"GETEX", get.name, b"PX", _life_ms(get.ttl_s))
        super().__init__(get.name, written(*words), get.head.nbytes + get.body.nbytes)
        self._get = get
        self._arrived = arrived

    def read(self, first: bytes, line: ValkeyLine) -> None:
        get = self._get
        length = bulk_length(first, line)
        head_bytes = get.head.nbytes
        room_bytes = head_bytes + get.body.nbytes
        if head_bytes <= length <= room_bytes:
            body_bytes = length - head_bytes
            line.read_value((get.head, get.body[:body_bytes]))
            get.body_bytes = body_bytes
            self._settle(Fate.DONE)
        elif length < 0:
            self._settle(Fate.MISSING)
        elif length <= room_bytes + MOST_SKIPPED_BYTES:
            line.skip_value(length)
            self._settle(Fate.MISFIT)
        else:
            self._settle(Fate.MISFIT)
            raise line.breach(f"it sends {length} bytes for a value of at most {room_bytes}")

    def refuse(self, denied: bool) -> bool:
        if not denied:
            self._settle(Fate.REFUSED)
        return not denied

    def _settle(self, fate: Fate) -> None:
        self._get.fate = fate
        if self._arrived is not None:
            self._arrived(self._get)


class PutValue(ValkeyCommand):
    """SET of a value, out of the caller's memory."""

    __slots__ = ("_put",)

    def __init__(self, put: Put) -> None:
        value_bytes = sum(memoryview(part).nbytes for part in put.parts)
        life = b""
        if put.ttl_s > 0:
            life_ms = _life_ms(put.ttl_s)
            life = b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(life_ms), life_ms)
        words = 5 if life else 3
        before = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(put.name), put.name, value_bytes)
        behind = b"\r\n" + life
        request_bytes = len(before) + value_bytes + len(behind)
        super().__init__(put.name, (before, *put.parts, behind), request_bytes, _SHORT_REPLY_BYTES)
        self._put = put

    def read(self, first: bytes, line: ValkeyLine) -> None:
        if first != b"+OK":
            raise line.breach("it did not answer a SET with OK")
        self._put.fate = Fate.DONE

    def refuse(self, denied: bool) -> bool:
        if not denied:
            self._put.fate = Fate.REFUSED
        return not denied


class ExistsKey(ShortCommand):
    """EXISTS of one name: so it works in clusters too, and says which one is missing."""

    __slots__ = ("_place", "_there")

    def __init__(self, name: bytes, there: list[bool], place: int) -> None:
        super().__init__(name, b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name))
        self._there = there
        self._place = place

    def read(self, first: bytes, line: ValkeyLine) -> None:
        if first not in (b":0", b":1"):
            raise line.breach("it did not answer EXISTS with 0 or 1")
        self._there[self._place] = first == b":1"


class ExistsRun(ShortCommand):
    """EXISTS of many names for one server: as `ExistsKey`, at a fraction of the CPU time."""

    __slots__ = ("_next", "_there")

    def __init__(self, names: Sequence[bytes], there: list[bool], start: int) -> None:
        requests = [b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names]
        super().__init__(b"", b"".join(requests), len(names) * _SHORT_REPLY_BYTES)
        self.replies = len(names)
        self._there = there
        self._next = start

    def read_ahead(self, line: ValkeyLine, due: int) -> int:
        """All replies have four bytes, but for errors: those are left to `read`."""
        text = line.peek(4 * due)
        count = len(text) // 4
        text = text[: 4 * count]
        digits = text[1::4]
        if text[0::4] + text[2::4] + text[3::4] != b":" * count + b"\r" * count + b"\n" * count or digits.strip(b"01"):
            return 0
        self._there[self._next : self._next + count] = [digit == 49 for digit in digits]
        self._next += count
        line.pass_over(4 * count)
        return count

    def read(self, first: bytes, line: ValkeyLine) -> None:
        if first not in (b":0", b":1"):
            raise line.breach("it did not answer EXISTS with 0 or 1")
        self._there[self._next] = first == b":1"
        self._next += 1


class ReplicatedCommand(ShortCommand):
    """A command that changes something, and a WAIT behind it on the same line, so that it is about this change."""

    __slots__ = ("_command", "_next", "acked", "replicas", "wait_s")

    def __init__(self, name: bytes, command: bytes) -> None:
        super().__init__(name, command)
        self._command = command
        self._next = 0  # which of its replies comes next
        self.replicas = 0
        self.acked = 0
        """How many of them had it in time; all where the server does not tell."""
        self.wait_s = 0.0

    def await_replicas(self, count: int, seconds: float) -> None:
        """To be called before each time that it is sent, with the number of the server's replicas."""
        wait = written(b"WAIT", b"%d" % count, _life_ms(seconds)) if count else b""
        self.request = (self._command + wait,)
        self.request_bytes = len(self.request[0])
        self.replies = 2 if count else 1
        self.reply_bytes = self.replies * _SHORT_REPLY_BYTES
        self.replicas = self.acked = count
        self.wait_s = seconds
        self._next = 0

    def read(self, first: bytes, line: ValkeyLine) -> None:
        self._next += 1
        if self._next == 1:
            self.read_own(first, line)
        elif first[:1] == b":" and first[1:].isdigit() and len(first) <= 8:
            self.acked = int(first[1:])
        else:
            raise line.breach("it did not answer WAIT with a number")

    @abstractmethod
    def read_own(self, first: bytes, line: ValkeyLine) -> None:
        """`read`, for the reply to the command itself."""

    def passes_over(self, refusal: Refusal) -> bool:
        """See `ValkeyCommand`. A server without WAIT, or a user who may not run it: nobody can know more.

        Any other error to WAIT, such as that of a primary that has just become a replica, says that it was not waited.
        """
        self._next += 1
        if self._next != 2:
            return False
        if not (refusal.code == "NOPERM" or (refusal.code == "ERR" and refusal.text.startswith("unknown command"))):
            self.acked = 0
        return True


class Unlink(ReplicatedCommand):
    """UNLINK: a DEL that frees the memory in the background."""

    __slots__ = ()

    def __init__(self, name: bytes) -> None:
        super().__init__(name, written(b"UNLINK", name))

    def read_own(self, first: bytes, line: ValkeyLine) -> None:
        if first not in (b":0", b":1"):
            raise line.breach("it did not answer UNLINK with 0 or 1")


class ReplaceNote(ReplicatedCommand):
    """SET of a note."""

    __slots__ = ()

    def __init__(self, name: bytes, value: bytes) -> None:
        super().__init__(name, written(b"SET", name, value))

    def read_own(self, first: bytes, line: ValkeyLine) -> None:
        if first != b"+OK":
            raise line.breach("it did not answer a SET with OK")


class GetNote(ShortCommand):
    """GET of a note."""

    __slots__ = ("_place", "notes", "too_long")

    def __init__(self, name: bytes, notes: list[bytes | None], place: int) -> None:
        super().__init__(name, written(b"GET", name), MAX_NOTE_BYTES)
        self.notes = notes
        self.too_long = False
        self._place = place

    def read(self, first: bytes, line: ValkeyLine) -> None:
        self.too_long = bulk_length(first, line) > MAX_NOTE_BYTES
        self.notes[self._place] = _read_note(first, line)


class TouchNote(ShortCommand):
    """A change of a note that leaves it as it is, for a WAIT: it gets a lifetime, which `KeepNote` takes away."""

    __slots__ = ()

    def __init__(self, name: bytes) -> None:
        super().__init__(name, written(b"GETEX", name, b"PX", _life_ms(TOUCHED_S)), MAX_NOTE_BYTES)

    def read(self, first: bytes, line: ValkeyLine) -> None:
        _read_note(first, line)

    def passes_over(self, refusal: Refusal) -> bool:
        return True


class KeepNote(ReplicatedCommand):
    """GETEX of a note, behind `TouchNote`. `note` stays None where the server refuses to tell."""

    __slots__ = ("note",)

    def __init__(self, name: bytes) -> None:
        super().__init__(name, written(b"GETEX", name, b"PERSIST"))
        self.note: bytes | None = None

    def read_own(self, first: bytes, line: ValkeyLine) -> None:
        self.note = _read_note(first, line)

    def passes_over(self, refusal: Refusal) -> bool:
        super().passes_over(refusal)
        return True


def _read_note(first: bytes, line: ValkeyLine) -> bytes | None:
    """A note; None if there is none, or one that is too long. Raises StoreError."""
    length = bulk_length(first, line)
    if length > MAX_NOTE_BYTES + MOST_SKIPPED_BYTES:
        raise line.breach(f"it sends {length} bytes for a note of at most {MAX_NOTE_BYTES}")
    if length > MAX_NOTE_BYTES:
        line.skip_value(length)
        return None
    if length < 0:
        return None
    value = bytearray(length)
    line.read_value((memoryview(value),))
    return bytes(value)


class MakeNote(ShortCommand):
    """SET NX of a note. `stored` says whether there was none."""

    __slots__ = ("stored",)

    def __init__(self, name: bytes, value: bytes) -> None:
        super().__init__(name, written(b"SET", name, value, b"NX"))
        self.stored = False

    def read(self, first: bytes, line: ValkeyLine) -> None:
        if first not in (b"+OK", b"$-1"):
            raise line.breach("it did not answer a SET with OK")
        self.stored = first == b"+OK"


class CountReplicas(ShortCommand):
    """INFO: how many replicas keep up with the server; 0 where it does not tell us."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__(b"", written(b"INFO", b"replication"), 1024)
        self.count = 0

    def read(self, first: bytes, line: ValkeyLine) -> None:
        length = bulk_length(first, line)
        if not 0 <= length <= MOST_SKIPPED_BYTES:
            raise line.breach(f"it tells of its replicas in {length} bytes")
        text = bytearray(length)
        line.read_value((memoryview(text),))
        self.count = sum(map(_keeps_up, re.findall(rb"^slave\d+:([^\r\n]*)", text, re.MULTILINE)))

    def passes_over(self, refusal: Refusal) -> bool:
        return True


def _keeps_up(replica: bytes) -> bool:
    """True if INFO tells of a replica that has all of the data, and says so again and again."""
    fields = dict(field.partition(b"=")[::2] for field in replica.split(b","))
    lag = fields.get(b"lag", b"")
    return fields.get(b"state") == b"online" and lag.isdigit() and int(lag[:8]) <= MAX_LAG_S


def bulk_length(first: bytes, line: ValkeyLine) -> int:
    """The length that a value's first line announces; -1: there is none. Raises StoreError."""
    digits = first[1:]
    if first[:1] == b"$" and digits.isdigit() and len(digits) <= 12:
        return int(digits)
    if first == b"$-1":
        return -1
    raise line.breach("it did not answer GET with a value")
