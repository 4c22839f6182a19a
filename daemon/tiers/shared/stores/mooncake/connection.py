"""The calls of Mooncake's store. They block as long as Mooncake does: see `helper`."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tiercache.daemon.tiers.shared.stores.mooncake import codes
from tiercache.daemon.tiers.shared.stores.mooncake.client import MooncakeClient
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

NOTES_TOGETHER = 16
NAMES_TOGETHER = 1024
VALUES_TOGETHER = 4
NOTE_COPIES = 3
"""Hosts that keep a copy of a note, if there are so many: a lost note makes all that lies below it unreachable."""
CHECK_BYTES = 8
TRIES = 8
"""How often a note that does not fit its checksum is read: another host is replacing it."""
AGAIN_S = 0.002
WAITING_NICENESS = 10
_NOTE_ROOM = MAX_NOTE_BYTES + CHECK_BYTES


class MooncakeConnection:
    """One worker's use of the client: `store.Connection`, whose deadlines hold only between Mooncake's calls.

    It is for the helper process, where a value has one buffer, in staging.
    """

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._native: Any = None
        self._notes = mmap.mmap(-1, NOTES_TOGETHER * _NOTE_ROOM)
        self._behind = False
        self._registered: dict[mmap.mmap, int] = {}
        """Buffers that the client knows, and where they are."""

    def exists(self, names: Sequence[bytes], notes: Sequence[bytes], deadline_s: float) -> Exists:
        with self._call(deadline_s) as native:
            found = self._read_notes(native, notes, deadline_s)
            there: list[bool] = []
            for first in range(0, len(names), NAMES_TOGETHER):
                _check_time(deadline_s)
                keys = [file_name(name) for name in names[first : first + NAMES_TOGETHER]]
                for code in native.batch_is_exist(keys):
                    self._require(code >= 0 or codes.is_of_object(code), code)
                    there.append(code == 1)
            return Exists(there, found)

    def get(
        self,
        wanted: Sequence[Get],
        notes: Sequence[bytes],
        deadline_s: float,
        arrived: Arrived | None = None,
        noted: Noted | None = None,
    ) -> list[bytes | None]:
        with self._call(deadline_s) as native:
            found = self._read_notes(native, notes, deadline_s)
            if noted is not None:
                noted(found)
            for first in range(0, len(wanted), VALUES_TOGETHER):
                _check_time(deadline_s)
                some = wanted[first : first + VALUES_TOGETHER]
                keys = [file_name(get.name) for get in some]
                places = [self._place(native, get.body) for get in some]
                results = self._read(native, some, keys, places)
                for get, code in zip(some, results, strict=True):
                    assert not get.head
                    get.fate = self._fate(code, codes.fate_of_read, len(get.body))
                    get.body_bytes = code if get.fate is Fate.DONE else 0
                    if arrived is not None:
                        arrived(get)
            return found

    @staticmethod
    def _read(native: Any, some: Sequence[Get], keys: list[str], places: list[int]) -> list[int]:
        """Codes, or how many bytes were read."""
        if not any(get.offset or get.ranged for get in some):
            whole: list[int] = native.batch_get_into(keys, places, [len(get.body) for get in some])
            return whole
        results = []
        for get, key, place in zip(some, keys, places, strict=True):
            size = native.get_size(key)
            if size >= 0:
                length = min(size - get.offset, len(get.body)) if get.ranged else size - get.offset
                if length <= 0 or length > len(get.body):
                    size = codes.INVALID
                else:
                    size = native.get_into_ranges([place], [[key]], [[[0]]], [[[get.offset]]], [[[length]]])[0][0][0]
            results.append(size)
        return results

    def put(self, values: Sequence[Put], notes: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        with self._call(deadline_s) as native:
            found = self._read_notes(native, notes, deadline_s)
            for first in range(0, len(values), VALUES_TOGETHER):
                _check_time(deadline_s)
                some = values[first : first + VALUES_TOGETHER]
                views = [put.parts[0] for put in some]
                assert all(len(put.parts) == 1 for put in some)
                places = [self._place(native, view) for view in views if isinstance(view, memoryview)]
                # One that is there stays as it is, and counts as written.
                results = native.batch_put_from([file_name(put.name) for put in some], places, [*map(len, views)])
                for put, code in zip(some, results, strict=True):
                    put.fate = self._fate(code, codes.fate_of_write)
            return found

    def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        with self._call(deadline_s) as native:
            for first in range(0, len(names), NAMES_TOGETHER):
                _check_time(deadline_s)
                keys = [file_name(name) for name in names[first : first + NAMES_TOGETHER]]
                # By force: others may be reading. What they then read is checked, as everything is.
                for code in native.batch_remove(keys, True):
                    self._require(code == 0 or codes.is_of_object(code), code)

    def set_note(self, name: bytes, value: bytes, deadline_s: float, only_if_missing: bool = False) -> bytes:
        with self._call(deadline_s) as native:
            key = file_name(name)
            before = self._read_notes(native, [name], deadline_s)[0]
            if only_if_missing:
                if before is not None:
                    return before
                code = native.put(key, _check(value) + value, _note_config())
                self._require(code == 0 or codes.is_of_object(code), code)
                there = self._read_notes(native, [name], deadline_s)[0]
                if there is not None:
                    return there
                # There is something else than a note, or the note was lost just now.
            while True:
                _check_time(deadline_s)
                code = native.upsert(key, _check(value) + value, _note_config())
                self._require(code == 0 or codes.is_of_object(code) or codes.is_of_transfer(code), code)
                there = self._read_notes(native, [name], deadline_s)[0] if code == 0 else None
                if there is not None and (there == value or there != before):
                    return there  # ours, or that of a host that came after us
                time.sleep(AGAIN_S)

    def close(self) -> None:
        """Let the client forget our buffers, which are freed next. Ends no call under way: no thread can."""
        for place in self._registered.values():
            self._native.unregister_buffer(place)
        self._registered.clear()

    # --- notes -----------------------------------------------------------------------------------

    def _read_notes(self, native: Any, names: Sequence[bytes], deadline_s: float) -> list[bytes | None]:
        found: dict[bytes, bytes | None] = {}
        left, tries = list(dict.fromkeys(names)), 0
        while left:
            torn: list[bytes] = []
            for first in range(0, len(left), NOTES_TOGETHER):
                _check_time(deadline_s)
                some = left[first : first + NOTES_TOGETHER]
                start = self._place(native, memoryview(self._notes))
                places = [start + number * _NOTE_ROOM for number in range(len(some))]
                results = native.batch_get_into([file_name(name) for name in some], places, [_NOTE_ROOM] * len(some))
                for number, (name, code) in enumerate(zip(some, results, strict=True)):
                    # It may well be there: it must not be taken for missing.
                    self._require(not codes.is_of_transfer(code), code)
                    found[name] = None
                    if self._fate(code, codes.fate_of_read, _NOTE_ROOM) is Fate.DONE:
                        text = self._notes[number * _NOTE_ROOM : number * _NOTE_ROOM + code]
                        found[name] = text[CHECK_BYTES:]
                        if _check(text[CHECK_BYTES:]) != text[:CHECK_BYTES]:
                            found[name] = None
                            torn.append(name)
            tries += 1
            if not torn or tries == TRIES:
                break
            time.sleep(AGAIN_S * tries)
            left = torn
        return [found[name] for name in names]

    # --- the rest --------------------------------------------------------------------------------

    @contextmanager
    def _call(self, deadline_s: float) -> Iterator[Any]:
        _check_time(deadline_s)
        self._native = self._client.use(deadline_s)
        if not self._behind:
            self._behind = True
            step_behind()
        yield self._native

    def _place(self, native: Any, view: memoryview) -> int:
        """The address of a view, in a buffer that the client knows."""
        buffer = view.obj
        assert isinstance(buffer, mmap.mmap)
        if buffer not in self._registered:
            for old in [one for one in self._registered if one is not self._notes and buffer is not self._notes]:
                native.unregister_buffer(self._registered.pop(old))  # staging that is too small by now
            place = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            code = native.register_buffer(place, len(buffer))
            if code != 0:
                raise StoreError(StoreProblem.BUSY, f"Mooncake's client registers no buffer (code {code})")
            self._registered[buffer] = place
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else self._registered[buffer]

    def _fate(self, code: int, fate_of: Any, *more: int) -> Fate:
        try:
            fate: Fate = fate_of(code, *more)
        except StoreError as error:
            self._client.failed(error, code)
            raise
        return fate

    def _require(self, good: bool, code: int) -> None:
        if not good:
            error = codes.failure(code)
            self._client.failed(error, code)
            raise error


def step_behind() -> None:
    """Let other threads run before this one.

    Mooncake's calls wait for their transfers by looking all the time, and where cores are few they take them from the
    threads that transfer, here and on the other hosts of the same machine.
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < WAITING_NICENESS:
        with contextlib.suppress(OSError):  # a sandbox may forbid it: then it is slower
            os.setpriority(os.PRIO_PROCESS, thread, WAITING_NICENESS)


def _check(note: bytes) -> bytes:
    return hashlib.blake2b(note, digest_size=CHECK_BYTES).digest()


def _note_config() -> Any:
    """Notes are on several hosts, and are never evicted."""
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.replica_num = NOTE_COPIES
    config.with_hard_pin = True
    return config


def _check_time(deadline_s: float) -> None:
    if time.monotonic() >= deadline_s:
        raise StoreError(StoreProblem.TIMEOUT, "the time was over before its turn")
