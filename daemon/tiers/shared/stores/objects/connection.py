"""The store's calls, as requests."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from tiercache.daemon.tiers.shared.stores.copying import copy_view
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

from . import troubles
from .requests import BucketRequests, Job
from .settings import ObjectSettings

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
    """`store.Connection` to a bucket.

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
                raise troubles.object_store_error(self._settings, answer) from answer
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
            if troubles.is_missing(error):
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
            if troubles.is_missing(error):
                return Fate.MISSING
            if troubles.status_of(error) == 416:  # it ends before the range begins
                return Fate.MISFIT
            raise

    async def _fetch_range(self, key: str, offset: int, room: int) -> Any:
        try:
            found = await self._obstore.get_async(self._shared.bucket, key, options={"range": (offset, offset + room)})
        except Exception as error:
            if not troubles.is_whole(error):
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
            if troubles.is_too_long(error):
                return Fate.REFUSED
            raise
        return Fate.DONE

    async def _delete(self, keys: list[str]) -> None:
        try:
            await self._obstore.delete_async(self._shared.once, keys)
            return
        except Exception as error:
            if not troubles.is_missing(error):
                raise
        for key in keys:  # some stores end at the first that is missing
            try:
                await self._obstore.delete_async(self._shared.once, key)
            except Exception as error:
                if not troubles.is_missing(error):
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
            if troubles.is_missing(error):
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

    return isinstance(error, (AlreadyExistsError, PreconditionError)) or troubles.status_of(error) in (409, 412)


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
