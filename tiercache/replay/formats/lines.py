"""The numbered lines of a trace file, compressed or not, and the errors for bad ones."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

from tiercache.errors import ConfigError

MAX_LINE_BYTES = 64 << 20
"""Limit of a line; a longer one is not a request."""
_GZIP = b"\x1f\x8b"


class BadTrace(ConfigError):
    """A trace cannot be read: file, line and what is wrong with it."""


class CutOff(BadTrace):
    """A compressed file ends early because its writer was stopped. The lines before the end are good."""


class BadLine(Exception):
    """What is wrong with one line; the reader that raises it does not know the line's number."""


class TraceLines:
    """A file's lines. Each iteration reads it from the start; memory holds one line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_bytes = 0
        """Bytes of the file on disk that the latest iteration has read."""

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk; 0 if unknown (a pipe)."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Number and text of every line that is not empty. Raises BadTrace."""
        self.read_bytes = 0
        try:
            with self.path.open("rb") as file, closing(_unpacked(file)) as text:
                number = 0
                while line := text.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise BadTrace(f"{self.path} line {number}: is longer than {MAX_LINE_BYTES >> 20} MiB")
                    if number % 256 == 0:
                        self.read_bytes = file.tell()
                    if stripped := line.strip():
                        yield number, stripped
        except EOFError as error:
            raise CutOff(f"{self.path}: its packed data is cut off; --skip-bad takes what is there") from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise BadTrace(f"{self.path}: its packed data is damaged ({error})") from error
        except OSError as error:
            raise BadTrace(f"{self.path}: {error.strerror or error}") from error


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """The file's text; its name does not matter."""
    head = file.read(2)
    file.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if head == _GZIP else file
