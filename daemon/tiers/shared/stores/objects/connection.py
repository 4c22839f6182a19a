"""The calls of a store on objects, as requests, and what the errors of obstore mean."""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from tiercache.daemon.tiers.shared.memory import copy_view
from tiercache.daemon.tiers.shared.stores.names import file_name
from tiercache.daemon.tiers.shared.stores.store import (
    MAX_NOTE_BYTES,
    Arrived,
    Exists,
    Fate,
    Get,
    Noted,
    Put,
    StoreError,
    StoreProblem,
)

from . import connection
from .requests import BucketRequests, Job
from .settings import CREDENTIALS, ObjectSettings

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket


WIDTH = 8
"""Transfers side by side for one call: as many values may be in memory besides their frames."""
LOOK_WIDTH = 32
PART_BYTES = 1 << 20
"""Bodies come in parts of this size: obstore makes each with the interpreter's lock held."""

log = logging.getLogger("tiercache.daemon")


class Shared:
    """What all connections to a store have in common."""

    def __init__(self, settings: ObjectSettings, bucket: Bucket, once: Bucket) -> None:
        self.settings = settings
        self.bucket = bucket
        self.once = once
        """The same, for requests that must not be sent again."""
        self.requests = BucketRequests()
        self.no_ranges = False
        """The server answers requests for a range with the whole object."""


class ObjectConnection:
    """`Connection` to a bucket.

    Notes are read beside what else a batch asks for, not before it: they are then as new or newer, and the batch takes
    half the time.
    """

    def __init__(self, shared: Shared) -> None:
        import obstore

        self._obstore = obstore
        self._shared = shared
        self._settings = shared.settings

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        jobs = (partial(self._head, self._value(name)) for name in names)
        there, found = [False] * len(names), self._no_notes(notes)
        for number, answer in self._do(chain(self._note_jobs(notes), jobs), LOOK_WIDTH, deadline_s):
            if number < len(notes):
                found[number] = answer
            else:
                there[number - len(notes)] = answer
        return Exists(there, found)

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        jobs = (
            partial(self._fetch, self._value(get.name), get.offset, len(get.head) + len(get.body), get.ranged)
            for get in wanted
        )
        found, awaited, early = self._no_notes(notes), len(notes), list[Get]()
        tell = arrived or (lambda get: None)
        if noted is not None and not notes:
            noted(found)
        for number, answer in self._do(chain(self._note_jobs(notes), jobs), WIDTH, deadline_s):
            if number < len(notes):
                found[number] = answer
                awaited -= 1
                if noted is not None and not awaited:
                    noted(found)
                    for get in early:
                        tell(get)
                continue
            get = wanted[number - len(notes)]
            if isinstance(answer, Fate):
                get.fate = answer
            else:
                _deliver(get, answer)
            if awaited and noted is not None:
                early.append(get)  # the notes are told first
            else:
                tell(get)
        return found

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        found = self._no_notes(notes)
        # Copies, made in this thread: from the deadline on the parts are the caller's again, whatever obstore does.
        jobs = (partial(self._store, self._value(put.name), _joined(put.parts)) for put in values)
        for number, answer in self._do(chain(self._note_jobs(notes), jobs), WIDTH, deadline_s):
            if number < len(notes):
                found[number] = answer
            else:
                values[number - len(notes)].fate = answer
        return found

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        keys = [key(name) for name in names for key in (self._value, self._note)]
        if keys:
            for _ in self._do([partial(self._delete, keys)], 1, deadline_s):
                pass

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        job = partial(self._write_note, self._note(name), value, only_if_missing)
        for _, note in self._do([job], 1, deadline_s):
            assert isinstance(note, bytes)
            return note
        raise AssertionError("one job has one answer")

    def replicated_note(self, name: bytes, deadline_s: float) -> bytes | None:
        return self.exists((), (name,), deadline_s).notes[0]

    def close(self) -> None:
        """Nothing is this connection's own: obstore keeps the sockets, and calls end at their deadlines."""

    # --- in the calling thread -------------------------------------------------------------------

    def _do(self, jobs: Iterable[Job], width: int, deadline_s: float) -> Iterator[tuple[int, Any]]:
        """Number and result of each job. Raises StoreError: what a job raises concerns all."""
        for number, answer in self._shared.requests.side_by_side(jobs, width, deadline_s):
            if isinstance(answer, StoreError):
                raise answer
            if isinstance(answer, Exception):
                raise connection.object_store_error(self._settings, answer) from answer
            yield number, answer

    def _note_jobs(self, notes: Sequence[bytes]) -> list[Job]:
        return [partial(self._read_note, self._note(name)) for name in notes]

    @staticmethod
    def _no_notes(notes: Sequence[bytes]) -> list[bytes | None]:
        return [None] * len(notes)

    @staticmethod
    def _value(name: bytes) -> str:
        return f"values/{file_name(name)}"

    @staticmethod
    def _note(name: bytes) -> str:
        return f"notes/{file_name(name)}"

    # --- in the event loop -----------------------------------------------------------------------

    async def _head(self, key: str) -> bool:
        try:
            await self._obstore.head_async(self._shared.bucket, key)
        except Exception as error:
            if connection.is_missing(error):
                return False
            raise
        return True

    async def _fetch(self, key: str, offset: int, room: int, ranged: bool) -> Any:
        """The bytes of a value, or the Fate that says why there are none."""
        try:
            if ranged and room and not self._shared.no_ranges:
                return await self._fetch_range(key, offset, room)
            return await self._fetch_whole(key, offset, room, ranged)
        except Exception as error:
            if connection.is_missing(error):
                return Fate.MISSING
            if connection.status_of(error) == 416:  # it ends before the range begins
                return Fate.MISFIT
            raise

    async def _fetch_range(self, key: str, offset: int, room: int) -> Any:
        try:
            found = await self._obstore.get_async(self._shared.bucket, key, options={"range": (offset, offset + room)})
        except Exception as error:
            if not connection.is_whole(error):
                raise
            self._shared.no_ranges = True
            text = "ignores ranges: each block costs the transfer of its whole pack. Write ?pack=1 in the URL"
            log.warning("the server of %s %s", self._settings.address, text)
            return await self._fetch_whole(key, offset, room, ranged=True)
        start, stop = found.range
        if start != offset or stop - start > room:
            text = f"{self._settings.address}: the server sends another range than it was asked for"
            raise StoreError(StoreProblem.PROTOCOL, text)
        return await _body(found, stop - start, 0, stop - start) or Fate.MISFIT

    async def _fetch_whole(self, key: str, offset: int, room: int, ranged: bool) -> Any:
        found = await self._obstore.get_async(self._shared.bucket, key)
        size = found.meta["size"]
        # Of a pack, `room` is that of a record at least, and all of its records have one size.
        if size > (self._settings.pack_blocks * room if ranged else room) or size < offset:
            return Fate.MISFIT
        first, end = (offset, min(offset + room, size)) if ranged else (0, size)
        return await _body(found, size, first, end) or Fate.MISFIT

    async def _store(self, key: str, data: bytes | mmap.mmap) -> Fate:
        try:
            await self._obstore.put_async(self._shared.bucket, key, data, use_multipart=False)
        except Exception as error:
            if connection.is_too_long(error):
                return Fate.REFUSED
            raise
        return Fate.DONE

    async def _delete(self, keys: list[str]) -> None:
        try:
            await self._obstore.delete_async(self._shared.once, keys)
            return
        except Exception as error:
            if not connection.is_missing(error):
                raise
        for key in keys:  # some stores end at the first that is missing
            try:
                await self._obstore.delete_async(self._shared.once, key)
            except Exception as error:
                if not connection.is_missing(error):
                    raise

    async def _read_note(self, key: str) -> bytes | None:
        try:
            found = await self._obstore.get_async(self._shared.bucket, key)
            size = found.meta["size"]
            if size > MAX_NOTE_BYTES:
                return None
            parts = await _body(found, size, 0, size)
            return None if parts is None else b"".join(parts)
        except Exception as error:
            if connection.is_missing(error):
                return None
            raise

    async def _write_note(self, key: str, value: bytes, only_if_missing: bool) -> bytes:
        if only_if_missing:
            there = await self._read_note(key)
            if there is not None:
                return there
            try:
                await self._obstore.put_async(self._shared.once, key, value, mode="create")
            except Exception as error:
                if not _is_taken(error):
                    raise
            # Of two at once, a server that knows no conditions keeps the last.
            return await self._read_note(key) or value
        await self._obstore.put_async(self._shared.once, key, value, use_multipart=False)
        return value


async def _body(found: Any, length: int, first: int, end: int) -> list[memoryview] | None:
    """Bytes `first ..< end` of an answer, in parts; None where it has not the `length` that was promised.

    An answer that is longer is read little further.
    """
    parts, at = list[memoryview](), 0
    async for chunk in found.stream(min_chunk_size=min(length + 1, PART_BYTES)):
        part = memoryview(chunk).cast("B")
        wanted = part[max(0, first - at) : max(0, end - at)]
        if len(wanted):
            parts.append(wanted)
        at += len(part)
        if at > length:
            break
    return (parts or [memoryview(b"")]) if at == length else None


def _is_taken(error: Exception) -> bool:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return isinstance(error, (AlreadyExistsError, PreconditionError)) or connection.status_of(error) in (409, 412)


def _deliver(get: Get, parts: Sequence[memoryview]) -> None:
    """Copy what was read into `head` and `body`."""
    rest = sum(map(len, parts)) - len(get.head)
    if not 0 <= rest <= len(get.body):
        get.fate = Fate.MISFIT
        return
    head, body = get.head, get.body
    for part in parts:
        in_head = min(len(part), len(head))
        head[:in_head] = part[:in_head]
        copy_view(part[in_head:], body)
        head, body = head[in_head:], body[len(part) - in_head :]
    get.fate, get.body_bytes = Fate.DONE, rest


def _joined(parts: Sequence[memoryview | bytes]) -> bytes | mmap.mmap:
    """All of them, in memory that the kernel clears: a bytearray would be cleared with the interpreter's lock held."""
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    joined = mmap.mmap(-1, sum(map(len, parts)))
    start = 0
    with memoryview(joined) as target:
        for part in parts:
            copy_view(memoryview(part).cast("B"), target[start:])
            start += len(part)
    return joined


# --- what errors mean --------------------------------------------------------------------------------
#
# obstore has one exception for most failures: the rest is in its text, the cause at the end of what it calls its debug
# source. Answers of servers are quoted by their code alone, since their text may name keys. No text has a duration or a
# name of an object in it: a reason that lasts stays the same.

_STATUS = re.compile(r"status code: ([1-5][0-9][0-9])")
_CODE = re.compile(r"<Code>([A-Za-z.]{1,64})</Code>|\"reason\": *\"([A-Za-z]{1,64})\"")
_SKEW = frozenset({"RequestTimeTooSkewed", "RequestExpired", "AccessDenied.RequestTimeTooSkewed"})
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_FULL = frozenset({"QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull", "InsufficientStorage", "NoSpaceLeft"})
_BUSY = frozenset({429, 500, 502, 503, 504})
_TIME_OUT = re.compile(r"operation timed out|TimedOut|deadline has elapsed")
_ATTEMPT = re.compile(r"^Generic \w+ error: (?:Error performing \w+ \S+ in \S+, after .*? - )?")
"""What obstore writes before the cause: the URL of one object, and how long it took."""
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_QUOTED = re.compile(r'(?:message|error): "((?:[^"\\]|\\.)*)"')
_PRESENTED = re.compile(r"presented: \[([^\]]*)\]")
_NAME = re.compile(r'[A-Za-z0-9*][A-Za-z0-9*.:-]*(?=\\?"\))|(?<=\()[0-9a-f.:]+(?=\))')
_NOT_TLS = re.compile(r"InvalidMessage\(|InvalidContentType|CorruptMessage")
_TRUST = "name its CA in the URL (?ca=/etc/ssl/our-ca.pem), or in SSL_CERT_FILE"
_CERTIFICATES = {
    "UnknownIssuer": ("its certificate is of a CA that this host does not trust", _TRUST),
    "CaUsedAsEndEntity": ("its certificate is that of a CA", "give the server a certificate that a CA has signed"),
    "Expired": ("its certificate has expired", "renew it, or set the clock of this host"),
    "ExpiredContext": ("its certificate has expired", "renew it, or set the clock of this host"),
    "NotValidYet": ("its certificate is not valid yet", "set the clock of this host"),
    "NotValidYetContext": ("its certificate is not valid yet", "set the clock of this host"),
}
"""What is wrong with a server's certificate, by rustls's word, and what to do."""
_NAMES = frozenset({"NotValidForName", "NotValidForNameContext"})
_TOO_LONG = frozenset({"EntityTooLarge", "RequestBodyTooLarge"})


def status_of(error: Exception) -> int:
    """The HTTP status that the server has answered with; 0 if it has not."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def code_of(error: Exception) -> str:
    """The server's own word for the failure, if it has one."""
    found = _CODE.search(str(error))
    return (found[1] or found[2]) if found else ""


def is_missing(error: Exception) -> bool:
    """True if there is no such object, in a bucket that exists as far as is known."""
    return (isinstance(error, FileNotFoundError) or status_of(error) == 404) and code_of(error) not in _NO_BUCKET


def is_too_long(error: Exception) -> bool:
    """True if the server refuses this object for its size."""
    return status_of(error) == 413 or code_of(error) in _TOO_LONG


def is_whole(error: Exception) -> bool:
    """True if the server has answered a request for a range with status 200."""
    return "non-partial response" in str(error)


def object_store_error(settings: ObjectSettings, error: Exception) -> StoreError:
    """A failed request as one line."""
    status, code = status_of(error), code_of(error)
    said = " ".join(filter(None, [f"HTTP {status}" if status else "", code]))
    if not status and (found := _broken_tls(error)) is not None:
        return StoreError(StoreProblem.UNREACHABLE, f"{settings.address}: {found[0]}: {found[1]}")
    problem, remedy = _judge(settings, error, status, code)
    return StoreError(problem, f"{settings.address}: {said or _cause(error)}: {remedy}")


def _broken_tls(error: Exception) -> tuple[str, str] | None:
    """What is wrong with the server's certificate, or with its TLS, and what to do."""
    text = str(error)
    found = _CERTIFICATE.search(text)
    if found is not None and found[1] in _NAMES:
        presented = _PRESENTED.search(text)
        names = ", ".join(_NAME.findall(presented[1])) if presented is not None else ""
        return f"its certificate is for {names or 'another name'}", "write that name into the URL's endpoint"
    if found is not None:
        return _CERTIFICATES.get(found[1], (f"its certificate is not good ({found[1]})", _TRUST))
    if _NOT_TLS.search(text):
        return "the server does not speak TLS there", "write http:// in the URL's endpoint, or the port of https"
    return None


def _judge(settings: ObjectSettings, error: Exception, status: int, code: str) -> tuple[StoreProblem, str]:
    if code in _SKEW:
        return StoreProblem.DENIED, "the clock of this host or of the server is wrong: set it (chrony, NTP)"
    if code in _NO_BUCKET:
        return StoreProblem.PROTOCOL, f"there is no bucket {settings.bucket}: make it"
    if code in _FULL or status == 507:
        return StoreProblem.FULL, "make room, or have a lifecycle rule of the bucket remove old values"
    if status in (401, 403):
        remedy = "see that these credentials may read, write and delete in the bucket"
        return (
            StoreProblem.DENIED,
            f"{CREDENTIALS[settings.scheme]}; {remedy}, and that the clock of this host is right",
        )
    if status in _BUSY:
        return StoreProblem.BUSY, "the server asks to come back later"
    if status in (301, 307, 308) or code == "AuthorizationHeaderMalformed":
        return StoreProblem.PROTOCOL, "the bucket is elsewhere: write its region in the URL (?region=...)"
    if status:
        return StoreProblem.PROTOCOL, "see whether the URL's endpoint is an object store of this kind"
    if _TIME_OUT.search(str(error)):
        return StoreProblem.TIMEOUT, "the server did not answer in time"
    if isinstance(error, (OSError, ConnectionError)) or "HTTP error" in str(error):
        return StoreProblem.UNREACHABLE, "see that the server runs, and the URL's endpoint"
    if "redential" in str(error) or "metadata" in str(error) or "latest/api/token" in str(error):
        return StoreProblem.DENIED, CREDENTIALS[settings.scheme]
    return StoreProblem.PROTOCOL, "see whether the URL's endpoint is an object store of this kind"


def _cause(error: Exception) -> str:
    """The innermost text of an error that no server has answered with, such as `Connection refused`.

    It has no URL of an object and no duration, so that one cause is one text for as long as it lasts.
    """
    first, _, _ = str(error).partition("\n")
    quoted = _QUOTED.findall(str(error))
    return str(quoted[-1] if quoted else _ATTEMPT.sub("", first))[:200] or type(error).__name__
