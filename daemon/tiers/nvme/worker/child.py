"""The worker process of one directory: `main`, started by `directory_worker`.

main thread   the control socket: lines come by it, and its end ends the process
files         opens the directory, makes segments, looks at it: one question at a time
blocks, rows  once the directory is open
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from tiercache.daemon.helper_processes.child import ControlSocket, run_child
from tiercache.daemon.tiers.forms.cipher import Cipher
from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog, CatalogState
from tiercache.daemon.tiers.nvme.disk.directory import Directory
from tiercache.daemon.tiers.nvme.disk.disk import DiskIO
from tiercache.errors import ConfigError, DirectoryUnavailable

from . import messages
from .lines import BlocksLine, RowsLine
from .opening import Plan, open_directory
from .packets import receive_message, send_message

log = logging.getLogger("tiercache.daemon")


def serve(control: ControlSocket) -> int:
    """Serve the lines that the daemon opens, in this order: files, blocks, rows. Returns when the daemon is gone."""
    threading.excepthook = _end_process
    control.say_ready()
    lines = []
    for _ in range(3):
        line = control.next_line()
        if line is None:
            return 0
        lines.append(line)
    files, blocks, rows = lines
    _start("files", _FilesLine(files, blocks, rows).run)
    while control.next_line() is not None:
        raise AssertionError("the daemon opens three lines")
    return 0


def _start(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """A thread has failed, of this module or of a part: without it the daemon would wait for answers forever."""
    if not issubclass(failed.exc_type, (BrokenPipeError, ConnectionResetError)):  # the daemon has gone, or given us up
        error = failed.exc_value or failed.exc_type()
        name = "?" if failed.thread is None else failed.thread.name
        log.error("thread %s of a worker process fails, which ends the process", name, exc_info=error)
    os._exit(1)


class _FilesLine:
    """Answers questions about the directory's files. `run` is for one thread."""

    def __init__(self, line: socket.socket, blocks: socket.socket, rows: socket.socket) -> None:
        self._line = line
        self._blocks = blocks
        self._rows = rows

    def run(self) -> None:
        """Open the directory as the first question says, then answer the others until the line is closed."""
        first = self._next()
        if not isinstance(first, messages.Open):
            return
        rows = RowsLine(self._rows)
        try:
            directory, catalog, state = _open(first, rows)
        except (ConfigError, DirectoryUnavailable) as error:
            self._say(messages.Refused(isinstance(error, ConfigError), str(error)))
            return
        blocks = BlocksLine(self._blocks, directory, first.why_not_aio)
        _start("rows", lambda: rows.run(catalog))
        _start("blocks", blocks.run)
        self._say(_opened(directory, state, blocks))
        while (question := self._next()) is not None:
            self._say(_answer(directory, question))

    def _next(self) -> messages.FileQuestion | None:
        message = receive_message(self._line)
        return None if message is None else messages.decode_question(message)

    def _say(self, answer: messages.FileAnswer) -> None:
        send_message(self._line, messages.encode(answer))


def _open(asked: messages.Open, rows: RowsLine) -> tuple[Directory, Catalog, CatalogState]:
    plan = Plan(
        Path(asked.path),
        asked.cap_bytes,
        asked.segment_bytes,
        Cipher(asked.key) if asked.key else None,
        asked.may_shrink,
        asked.require_mount,
        asked.daemon_pid,
    )
    return open_directory(plan, DiskIO(), rows.post, asked.home)


def _opened(directory: Directory, state: CatalogState, blocks: BlocksLine) -> messages.Opened:
    assert directory.home is not None
    return messages.Opened(
        directory_id=directory.superblock.directory_id,
        created_s=directory.superblock.created_s,
        segment_bytes=directory.segment_bytes,
        db_reserve_bytes=directory.db_reserve_bytes,
        direct=directory.direct,
        direct_reason=directory.direct_reason,
        io=blocks.io,
        io_reason=blocks.io_reason,
        kept_bytes=directory.kept_bytes,
        segments=directory.segments,
        home=directory.home,
        state=state,
    )


def _answer(directory: Directory, question: messages.FileQuestion) -> messages.FileAnswer:
    try:
        match question:
            case messages.CreateSegment(segment):
                directory.create_segment(segment)
            case messages.LookAtPath():
                return messages.Good(directory.look())
            case messages.Open():
                raise AssertionError("a directory is opened once")
    except OSError as error:
        return messages.Bad(error.errno or errno.EIO)
    return messages.Good()


def main() -> None:
    """The process."""
    run_child(serve, "the worker process of an nvme directory")
