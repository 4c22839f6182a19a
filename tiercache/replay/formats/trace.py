"""One trace: its format, its namespaces, and its requests in time order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from tiercache.errors import ConfigError
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.formats.lines import BadLine, BadTrace, CutOff, TraceLines
from tiercache.replay.requests import TraceRequest

SORTED_REQUESTS = 1024
"""Window of requests that are sorted by time."""
LOOKED_AT_LINES = 256
"""Lines from which the format and the block size are determined."""


class Reader(Protocol):
    """Converts the lines of one format to requests, in turn."""

    in_order: bool
    """True if its lines are in the order of events, even if their times say otherwise."""

    def read(self, line: bytes) -> Iterable[TraceRequest]:
        """The requests that a line completes; often a single one, perhaps none. Raises BadLine."""

    def end(self) -> Iterable[TraceRequest]:
        """The requests that waited for the end of the file."""

    @property
    def specs(self) -> dict[int, NamespaceSpec]:
        """The namespaces of all requests so far, by number."""


class Format(Protocol):
    """One format: how to recognise its lines, and the Reader for them."""

    name: str

    def fits(self, line: bytes) -> bool:
        """True if the first line of a file is of this format."""

    def open(self, sample: list[bytes], block_tokens: int | None, block_bytes: Callable[[int], int]) -> Reader:
        """A reader for a file that begins with `sample`. Raises BadLine.

        `block_bytes(block_tokens)`: bytes of a block, if the trace does not say.
        """


class Trace:
    """A file of requests. Each iteration reads it again; memory holds a window of it."""

    def __init__(
        self,
        path: Path,
        formats: Iterable[Format],
        block_bytes: Callable[[int], int],
        block_tokens: int | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.path = path
        self.lines = TraceLines(path)
        self.bad_lines = 0
        """Lines left out in the latest iteration."""
        self.late_requests = 0
        """Requests of the latest iteration with a time before that of one already played."""
        self.first_problem = ""
        self._skip_bad = skip_bad
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._sample = self._first_lines()
        self.format = self._tell(list(formats))
        self.reader = self._open()

    def _first_lines(self) -> list[bytes]:
        sample = []
        for _, line in self._good_lines():
            sample.append(line)
            if len(sample) == LOOKED_AT_LINES:
                break
        if not sample:
            raise BadTrace(f"{self.path}: is empty: there is no request in it")
        return sample

    def _tell(self, formats: list[Format]) -> Format:
        if len(formats) == 1:
            return formats[0]
        # With `--skip-bad` the first line may be left out.
        for line in self._sample[: LOOKED_AT_LINES if self._skip_bad else 1]:
            for one in formats:
                if one.fits(line):
                    return one
        names = ", ".join(one.name for one in formats)
        what = "no JSON" if not is_json(self._sample[0]) else "no format that is known"
        raise BadTrace(f"{self.path} line 1: {what}: choose with --format one of {names}, if it is one of these")

    def _open(self) -> Reader:
        try:
            return self.format.open(self._sample, self._block_tokens, self._block_bytes)
        except BadLine as error:
            raise BadTrace(f"{self.path}: {error}") from error

    @property
    def specs(self) -> dict[int, NamespaceSpec]:
        """The namespaces of all requests read so far; a replay looks again when a number is new to it."""
        return self.reader.specs

    def __iter__(self) -> Iterator[TraceRequest]:
        """All requests, sorted by time within a window. Raises BadTrace."""
        self.bad_lines = self.late_requests = 0
        self.reader = self._open()
        requests = self._requests()
        return requests if self.reader.in_order else self._sorted(requests)

    def _requests(self) -> Iterator[TraceRequest]:
        for number, line in self._good_lines():
            try:
                yield from self.reader.read(line)
            except BadLine as error:
                self._bad(number, error)
        yield from self.reader.end()

    def _good_lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines up to the end of a truncated file, if bad lines are to be left out."""
        try:
            yield from self.lines
        except CutOff as error:
            if not self._skip_bad:
                raise
            self.bad_lines += 1
            self.first_problem = self.first_problem or str(error)

    def _bad(self, number: int, error: BadLine) -> None:
        text = f"{self.path} line {number}: {error}"
        if not self._skip_bad:
            raise BadTrace(f"{text}; --skip-bad leaves such lines out")
        self.bad_lines += 1
        self.first_problem = self.first_problem or text

    def _sorted(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        window: list[tuple[float, int, TraceRequest]] = []
        latest_s = float("-inf")
        for number, request in enumerate(requests):
            if len(window) < SORTED_REQUESTS:
                heapq.heappush(window, (request.time_s, number, request))
                continue
            time_s, _, first = heapq.heappushpop(window, (request.time_s, number, request))
            self.late_requests += time_s < latest_s
            latest_s = max(latest_s, time_s)
            yield first
        for time_s, _, first in sorted(window, key=lambda one: one[:2]):
            self.late_requests += time_s < latest_s
            latest_s = max(latest_s, time_s)
            yield first


def is_json(line: bytes) -> bool:
    """True if a line is JSON at all."""
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True


def check_block_size(block_size: int | None) -> None:
    """Raises ConfigError for an impossible block size."""
    if block_size is not None and not 1 <= block_size <= 1 << 20:
        raise ConfigError(f"--block-size {block_size}: must be 1 to 1048576")
