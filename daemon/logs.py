"""Logging that never blocks the loop: records go through a queue to a thread that writes stderr."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import sys

_SYSTEMD_LEVELS = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4, "INFO": 6, "DEBUG": 7}
_QUEUE_RECORDS = 10_000


class _Text(logging.Formatter):
    def __init__(self, under_systemd: bool) -> None:
        # The journal has its own clock and takes the level from a prefix.
        super().__init__("%(message)s" if under_systemd else "%(asctime)s %(levelname)s %(message)s")
        self._under_systemd = under_systemd

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"<{_SYSTEMD_LEVELS[record.levelname]}>{text}" if self._under_systemd else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"time_s": record.created, "level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _Queue(logging.handlers.QueueHandler):
    """Drops records that find the queue full, rather than wait for a stuck stderr."""

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            return


def start_logging(level: str, log_format: str) -> logging.handlers.QueueListener:
    """Send this process's log to stderr from a thread; `stop()` what is returned to flush it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text("JOURNAL_STREAM" in os.environ))
    records: queue.Queue[logging.LogRecord] = queue.Queue(_QUEUE_RECORDS)
    root = logging.getLogger()
    root.handlers[:] = [_Queue(records)]
    root.setLevel(level.upper())
    listener = logging.handlers.QueueListener(records, handler)
    listener.start()
    return listener
