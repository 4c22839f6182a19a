"""Logging that never blocks the event loop: records go through a bounded queue to a thread that writes stderr.

Records that cannot be written are lost, counted, and reported as soon as writing works again: a full disk, a pipe
without a reader or a stopped terminal costs log lines and nothing else, least of all the process. Repeated lines are
cut to `MAX_ALIKE` in `ALIKE_S`, with the number of those left out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import threading
import time
from datetime import datetime, timezone
from typing import Any, NamedTuple

_SYSTEMD_LEVELS = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4, "INFO": 6, "DEBUG": 7}
STDERR = 2
MAX_QUEUED = 10_000
MAX_ALIKE = 20
ALIKE_S = 10.0
MAX_KINDS = 256
"""Kinds of lines that are counted apart; beyond that all others are one kind."""
STOP_S = 2.0
"""Time for queued records to be written at shutdown."""
_LOOK_S = 0.5
_ATOMIC_BYTES = 4096
"""Bytes that a pipe takes without blocking once poll calls it writable (pipe(7), PIPE_BUF)."""


def fields(**values: Any) -> dict[str, Any]:
    """Extra fields of a JSON line: `log.info("...", **fields(event="slow_request", work_ms=3))`."""
    return {"extra": {"fields": values}}


class _Text(logging.Formatter):
    def __init__(self, under_systemd: bool) -> None:
        # The journal has its own clock and takes the level from a prefix.
        super().__init__("%(message)s" if under_systemd else "%(asctime)s %(levelname)s %(message)s")
        self._under_systemd = under_systemd

    def format(self, record: logging.LogRecord) -> str:
        # One record is one line: names of files, and texts of others, must not look like a line of ours.
        record.msg, record.args = _one_line(record.getMessage()), None
        text = super().format(record)
        return f"<{_SYSTEMD_LEVELS[record.levelname]}>{text}" if self._under_systemd else text


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def rfc3339(unix_s: float) -> str:
    """A time in UTC: `2026-11-22T17:14:03.125000Z`."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": rfc3339(record.created), "level": record.levelname, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_text:
            line["traceback"] = record.exc_text
        return json.dumps(line, default=str)


class _Kind(NamedTuple):
    """How many lines of one kind came since `since_s`, and the last one that was left out."""

    since_s: float
    lines: int
    left_out: logging.LogRecord | None


class Repetitions:
    """Detects repeated lines. Any thread."""

    def __init__(self) -> None:
        self.left_out_lines = 0
        self._lock = threading.Lock()
        self._kinds: dict[tuple[int, str], _Kind] = {}

    def admit(self, record: logging.LogRecord, now_s: float) -> bool:
        """True if the line should be written. Its kind is the text before arguments are filled in."""
        name = (record.levelno, str(record.msg))
        with self._lock:
            if name not in self._kinds and len(self._kinds) >= MAX_KINDS:
                name = (record.levelno, "")
            kind = self._kinds.get(name, _Kind(now_s, 0, None))
            if now_s - kind.since_s >= ALIKE_S and kind.left_out is None:
                kind = _Kind(now_s, 0, None)
            admitted = kind.lines < MAX_ALIKE
            self.left_out_lines += not admitted
            self._kinds[name] = _Kind(kind.since_s, kind.lines + 1, None if admitted else record)
            return admitted

    def ended(self, now_s: float) -> list[logging.LogRecord]:
        """For each kind with lines left out, when its time is up: a line that says how many."""
        told = []
        with self._lock:
            for name, kind in list(self._kinds.items()):
                if now_s - kind.since_s < ALIKE_S:
                    continue
                del self._kinds[name]
                if (last := kind.left_out) is not None:
                    text = f"{kind.lines - MAX_ALIKE} more lines like this one were left out: {last.getMessage()}"
                    told.append(_line(last.levelno, text))
        return told


def _line(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("tiercache.daemon", level, __file__, 0, text, None, None)


class Log(logging.Handler):
    """Takes records from any thread without waiting, and writes them on one of its own. `stop` it at the end."""

    def __init__(self, formatter: logging.Formatter, fd: int = STDERR) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.repetitions = Repetitions()
        self.lost_lines = 0
        self.problem = ""
        self._fd = fd
        self._untold = 0  # lost lines not yet reported in the log
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_QUEUED)  # None: look at the clock
        self._stop_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    # --- on the threads that log -------------------------------------------------------------------

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self.repetitions.admit(record, time.monotonic()):
                return
            # Filled in here: the objects may have changed when the thread gets to it.
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                # As text, since a traceback keeps everything in its frames alive.
                record.exc_text = logging.Formatter().formatException(record.exc_info)
                record.exc_info = None
            self._records.put_nowait(record)
        except queue.Full:
            self._lose("they came faster than they could be written")
        except Exception as error:  # noqa: BLE001 - a line that cannot be made must not fail who logs it
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, why: str) -> None:
        self.lost_lines += 1
        self._untold += 1
        self.problem = why

    # --- on the log's own thread -------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                wait_s = _LOOK_S if self._stop_at_s is None else 0
                record = self._records.get(wait_s > 0, wait_s)
                if record is None:
                    continue
            except queue.Empty:
                record = None
            if record is not None:
                self._say(record)
            stopping = self._stop_at_s is not None
            for line in self.repetitions.ended(time.monotonic() + (ALIKE_S if stopping and record is None else 0)):
                self._say(line)
            if stopping and (record is None or time.monotonic() >= (self._stop_at_s or 0)):
                return

    def _say(self, record: logging.LogRecord) -> None:
        assert self.formatter is not None
        text = self.formatter.format(record)
        if self._untold:
            untold, self._untold = self._untold, 0
            lost = _line(logging.WARNING, f"lines of the log that were lost: {untold} ({self.problem})")
            text = f"{self.formatter.format(lost)}\n{text}"
        else:
            untold = 0
        problem = _write(self._fd, f"{text}\n".encode(errors="backslashreplace"), self._may_wait)
        if problem:
            self._untold += untold
            self._lose(problem)
        elif not self._untold:  # else more were lost meanwhile
            self.problem = ""

    def _may_wait(self) -> bool:
        return self._stop_at_s is None or time.monotonic() < self._stop_at_s

    def stop(self, within_s: float = STOP_S) -> None:
        """Write what is queued within that time, then stop. Blocks little longer than that."""
        self._stop_at_s = time.monotonic() + within_s
        with contextlib.suppress(queue.Full):  # with that much to write it is awake
            self._records.put_nowait(None)
        self._thread.join(within_s + 2 * _LOOK_S)

    def figures(self) -> dict[str, Any]:
        """For the stats: what the log does not show."""
        return {
            "log_lost_lines": self.lost_lines,
            "log_left_out_lines": self.repetitions.left_out_lines,
            "log_problem": self.problem,
        }


def _write(fd: int, data: bytes, may_wait: Any) -> str:
    """Write all of it, waiting for as long as `may_wait()`; returns what went wrong, or an empty text.

    Writes only what a reader has room for, so that the thread can always be stopped.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while data:
        try:
            if not poll.poll(_LOOK_S * 1000 if may_wait() else 0):
                if may_wait():
                    continue
                return "nothing read them"
            data = data[os.write(fd, data[:_ATOMIC_BYTES]) :]
        except BlockingIOError:  # another process made it non-blocking, and others write to it too
            time.sleep(_LOOK_S / 10)
            if not may_wait():
                return "nothing read them"
        except OSError as error:
            return error.strerror or str(error)
    return ""


def last_words(text: str) -> None:
    """A line on stderr from a process that exits; dropped if writing takes too long or fails."""
    until_s = time.monotonic() + STOP_S
    _write(STDERR, f"{text}\n".encode(errors="backslashreplace"), lambda: time.monotonic() < until_s)


def start_logging(level: str, log_format: str) -> Log:
    """Send this process's log to stderr from a thread; `stop()` the result to flush it."""
    log = Log(_Json() if log_format == "json" else _Text("JOURNAL_STREAM" in os.environ))
    root = logging.getLogger()
    root.handlers[:] = [log]
    root.setLevel(level.upper())
    return log
