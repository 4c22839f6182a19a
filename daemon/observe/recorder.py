"""Recorder: writes the requests of engines to a file that `tiercache replay` plays on caches of other sizes.

    loop     looked / stored / fetched / forgot ─► bounded queue
    thread   hash the keys, find the known part of their chain ─► a line of JSON

Keys are hashed once more with a secret that is never stored, so a file tells which prompts begin alike and nothing of
their content. Recording never fails or delays a request: requests that find the queue full are lost and counted, and a
file that cannot be written or has reached its full size ends the recording. The format is in daemon/MONITORING.md.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import queue
import secrets
import threading
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from tiercache.config.daemon_config import DaemonConfig
from tiercache.daemon.tiers.dram.space import Namespace
from tiercache.errors import ConfigError
from tiercache.protocol.messages import KEY_BYTES, Hint

from .traffic import PROBE_ENGINE

log = logging.getLogger("tiercache.daemon")

VERSION = 1
HASH_BYTES = 12
MAX_QUEUED = 4096
MAX_QUEUED_BYTES = 32 << 20
"""Limit of the queue: requests, and the keys that they name."""
MAX_CHAINS = 256
MAX_CHAIN_BYTES = 16 << 20
"""Chains of keys that lines may refer to."""
LOOKED_THROUGH = 64
"""The latest of these are searched for the block before a store."""
FLUSH_S = 1.0
CLOSE_S = 5.0


class _Note(NamedTuple):
    """One request as it came. `parent`: of a store. `fields`: what its line has besides the chain."""

    kind: str
    time_ms: int
    namespaces: tuple[Namespace, ...]
    keys: bytes
    parent: bytes
    fields: dict[str, Any]


class Recorder:
    """The loop's side: every method but `close` returns at once and raises nothing."""

    def __init__(self, config: DaemonConfig, clock_s: Callable[[], float]) -> None:
        """Open the file; an earlier one is kept beside it as `.1`. Raises ConfigError. Blocks.

        `clock_s` is the clock of the policies.
        """
        assert config.record is not None
        self.path = config.record
        self.lost = 0
        self._clock_s = clock_s
        self._start_s = clock_s()
        self._queue: queue.SimpleQueue[_Note | None] = queue.SimpleQueue()
        self._put_bytes = 0
        self._thread = _Writer(config, self._start_s, self._queue, lambda: self.lost)
        self._thread.start()

    def looked(self, namespaces: Sequence[Namespace], keys: bytes, dram: int, below: int, promote: bool) -> None:
        """A match, with the blocks that were found; `promote`: blocks below DRAM are promoted."""
        self._put("m" if promote else "l", namespaces, keys, b"", {"had": [dram, below]})

    def stored(self, namespace: Namespace, parent: bytes, keys: bytes) -> None:
        """Frames were requested for a run of blocks below `parent` (empty: the root)."""
        self._put("s", (namespace,), keys, parent, {})

    def fetched(self, namespaces: Sequence[Namespace], keys: bytes) -> None:
        """A prefetch."""
        self._put("p", namespaces, keys, b"", {})

    def hinted(self, namespaces: Sequence[Namespace], hint: Hint) -> None:
        """A hint of a client."""
        fields = {
            "first": hint.first,
            "done": hint.done,
            "return_ms": hint.return_in_ms,
            "ttl_ms": hint.ttl_ms,
            "priority": hint.priority,
        }
        self._put("h", namespaces, hint.keys, b"", {name: value for name, value in fields.items() if value})

    def forgot(self, namespaces: Sequence[Namespace], key: bytes, tier: str) -> None:
        """A flush of one tier or of all: of namespaces, or of one block and what follows it."""
        self._put("f", namespaces, key, b"", {"tier": tier})

    def _put(
        self, kind: str, namespaces: Sequence[Namespace], keys: bytes, parent: bytes, fields: dict[str, Any]
    ) -> None:
        writer, size = self._thread, len(keys)
        if writer.ended or (namespaces and all(one.spec.engine == PROBE_ENGINE for one in namespaces)):
            return  # a readiness probe is not traffic
        if self._queue.qsize() >= MAX_QUEUED or self._put_bytes - writer.taken_bytes + size > MAX_QUEUED_BYTES:
            self.lost += 1
            return
        self._put_bytes += size
        time_ms = round((self._clock_s() - self._start_s) * 1000)
        self._queue.put(_Note(kind, time_ms, tuple(namespaces), keys, parent, fields))

    def stats(self) -> dict[str, Any]:
        """For `stats`: what was recorded, and what was lost."""
        writer = self._thread
        return {
            "path": str(self.path),
            "requests": writer.requests,
            "bytes": writer.size_bytes,
            "lost_requests": self.lost,
            "ended": writer.ended,
        }

    def close(self) -> None:
        """Write what is queued. Blocks, CLOSE_S at most."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)


class _Writer(threading.Thread):
    """Takes notes from the queue and writes their lines."""

    def __init__(
        self, config: DaemonConfig, start_s: float, notes: queue.SimpleQueue[_Note | None], lost: Callable[[], int]
    ) -> None:
        super().__init__(name="recorder", daemon=True)
        assert config.record is not None
        self.requests = 0
        self.size_bytes = 0
        self.taken_bytes = 0
        self.ended = ""
        """Why recording has ended; empty while it goes on."""
        self._path = config.record
        self._max_bytes = config.record_max_bytes
        self._notes = notes
        self._lost = lost
        self._lost_said = 0
        self._secret = secrets.token_bytes(32)
        self._chains = _Chains()
        self._known: set[int] = set()
        self._unflushed = False
        self._raw, self._file = _open(self._path)
        try:
            # So that a full disk shows when the daemon starts, not an hour later.
            self._say(_header(config, start_s))
            self._flush()
        except OSError as error:
            self._close()
            raise _unusable(self._path, error) from error

    def run(self) -> None:
        try:
            while not self.ended:
                try:
                    note = self._notes.get(timeout=FLUSH_S)
                except queue.Empty:
                    self._flush()
                    continue
                if note is None:
                    break
                self.taken_bytes += len(note.keys)
                self._write(note)
            self._flush()
        except OSError as error:
            self.ended = f"{self._path}: {error.strerror or error}"
            log.warning("recording has ended: %s", self.ended)
        finally:
            self._close()

    def _write(self, note: _Note) -> None:
        lost = self._lost()
        if lost > self._lost_said:
            self._say({"t": note.time_ms, "o": "lost", "requests": lost - self._lost_said})
            self._lost_said = lost
        for namespace in note.namespaces:
            if namespace.number not in self._known:
                self._known.add(namespace.number)
                self._say(_declaration(note.time_ms, namespace))
        line = {"t": note.time_ms, "o": note.kind, "n": [one.number for one in note.namespaces], **note.fields}
        if note.keys:
            self._name_blocks(line, note)
        self._say(line)
        self.requests += 1
        if self.size_bytes > self._max_bytes:
            self._say({"t": note.time_ms, "o": "end", "why": "record_max"})
            self.ended = f"{self._path} has the size of record_max"
            log.info("recording has ended: %s", self.ended)

    def _name_blocks(self, line: dict[str, Any], note: _Note) -> None:
        if note.kind == "f":
            line["k"] = self._hashed(note.keys)
            return
        before = self._chains.before(note.parent) if note.parent else b""
        if before is None:
            line["p"], line["k"] = self._hashed(note.parent), self._hashed(note.keys)
            return
        if note.kind == "s":
            line["f"] = len(before) // KEY_BYTES
        keys = before + note.keys
        base, chain, common = self._chains.place(keys)
        line["c"], line["b"], line["at"] = chain, base, common
        if common * KEY_BYTES < len(keys):
            line["k"] = self._hashed(keys[common * KEY_BYTES :])

    def _hashed(self, keys: bytes) -> str:
        blake2b, secret = hashlib.blake2b, self._secret
        parts = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
        return b64encode(b"".join(blake2b(one, key=secret, digest_size=HASH_BYTES).digest() for one in parts)).decode()

    def _say(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._unflushed = True
        # Compressed bytes may not be written yet: the cap is met to within a buffer.
        self.size_bytes = self._raw.tell()

    def _flush(self) -> None:
        if not self._unflushed:
            return
        self._unflushed = False
        self._file.flush()
        self._raw.flush()
        self.size_bytes = self._raw.tell()

    def _close(self) -> None:
        for file in (self._file, self._raw):
            try:
                file.close()
            except OSError as error:
                self.ended = self.ended or f"{self._path}: {error.strerror or error}"


def _open(path: Path) -> tuple[IO[bytes], IO[bytes]]:
    """The file, and the stream that lines are written to. Raises ConfigError."""
    try:
        if path.exists() and path.stat().st_size:
            path.replace(path.with_name(path.name + ".1"))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    raw = io.BufferedWriter(io.FileIO(fd, "wb"), 1 << 16)
    if path.suffix != ".gz":
        return raw, raw
    return raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=3, mtime=0)  # type: ignore[return-value]


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"record = {path}: {error.strerror}: make its directory writable, or choose another file")


def _header(config: DaemonConfig, start_s: float) -> dict[str, Any]:
    nvme = bool(config.nvme_dirs)
    return {
        "tiercache_trace": VERSION,
        "policy": config.policy,
        "clock_s": start_s,
        "arena_bytes": config.arena_bytes,
        "region_bytes": config.region_bytes,
        "nvme_bytes": config.nvme_capacity_bytes if nvme else 0,
        "nvme_dirs": len(config.nvme_dirs),
        "nvme_segment_bytes": config.nvme_segment_bytes,
        "headroom_bytes": config.headroom_bytes,
        "nvme_write_budget_bytes": config.nvme_write_budget_bytes,
    }


def _declaration(time_ms: int, namespace: Namespace) -> dict[str, Any]:
    spec = namespace.spec
    return {
        "t": time_ms,
        "o": "ns",
        "number": namespace.number,
        "block_tokens": spec.block_size,
        "block_bytes": spec.block_bytes,
        "window_blocks": spec.window_blocks,
        "dram_only": spec.dram_only,
    }


class _Chains:
    """Chains that lines have named, by a small number: the next turn of a conversation is written as its new blocks."""

    def __init__(self) -> None:
        self._chains: OrderedDict[int, bytes] = OrderedDict()  # least recently used first
        self._by_end: dict[bytes, int] = {}
        self._by_first: dict[bytes, int] = {}
        self._bytes = 0

    def before(self, parent: bytes) -> bytes | None:
        """The chain that ends with this key, as far as one of the latest ones shows it."""
        for number in list(reversed(self._chains))[:LOOKED_THROUGH]:
            chain = self._chains[number]
            at = chain.find(parent)
            while at >= 0 and at % KEY_BYTES:
                at = chain.find(parent, at + 1)
            if at >= 0:
                return chain[: at + KEY_BYTES]
        return None

    def place(self, keys: bytes) -> tuple[int, int, int]:
        """Which chain begins like this one, the number of this one from here on, and how many blocks they share.

        A chain contained in another one keeps that one's number, and changes nothing.
        """
        for end in range(len(keys), 0, -KEY_BYTES):
            base = self._by_end.get(keys[end - KEY_BYTES : end])
            if base is not None and self._chains[base] == keys[:end]:
                self._keep(base, keys)
                return base, base, end // KEY_BYTES
        base = self._by_first.get(keys[:KEY_BYTES])
        common = 0 if base is None else _common(self._chains[base], keys)
        if base is not None and common * KEY_BYTES == len(keys):
            self._chains.move_to_end(base)
            return base, base, common
        number = self._number()
        self._keep(number, keys)
        return number if base is None else base, number, common

    def _number(self) -> int:
        """A free number, or that of the least recently used chain."""
        if len(self._chains) < MAX_CHAINS:
            return next(number for number in range(MAX_CHAINS) if number not in self._chains)
        return next(iter(self._chains))

    def _keep(self, number: int, keys: bytes) -> None:
        self._drop(number)
        self._chains[number] = keys
        self._bytes += len(keys)
        self._by_end[keys[-KEY_BYTES:]] = self._by_first[keys[:KEY_BYTES]] = number
        while self._bytes > MAX_CHAIN_BYTES and len(self._chains) > 1:
            self._drop(next(iter(self._chains)))

    def _drop(self, number: int) -> None:
        keys = self._chains.pop(number, b"")
        self._bytes -= len(keys)
        for table, key in ((self._by_end, keys[-KEY_BYTES:]), (self._by_first, keys[:KEY_BYTES])):
            if table.get(key) == number:
                del table[key]


def _common(first: bytes, second: bytes) -> int:
    """Leading keys that two chains share. Equal keys have equal ones before them."""
    low, high = 0, min(len(first), len(second)) // KEY_BYTES
    while low < high:
        middle = (low + high) // 2
        here = slice(middle * KEY_BYTES, (middle + 1) * KEY_BYTES)
        if first[here] == second[here]:
            low = middle + 1
        else:
            high = middle
    return low
