"""The daemon's log: never in the way of the loop, whatever becomes of stderr; one line for each change."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

import pytest
from raw_client import WAIT_S
from waiting import wait_until

from tiercache.daemon.ground import logs

TEXT = logging.Formatter("%(levelname)s %(message)s")


def record(text: str, *arguments: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("tiercache.daemon", level, __file__, 1, text, arguments, None)


def read_lines(fd: int, count: int) -> list[str]:
    """Read `count` lines from a pipe."""
    text = b""
    while text.count(b"\n") < count:
        assert select.select([fd], [], [], WAIT_S)[0], f"{text.decode()}: more was expected"
        text += os.read(fd, 65536)
    return text.decode().splitlines()


def fill(fd: int) -> int:
    """Write until a pipe takes no more; returns how many bytes it took."""
    os.set_blocking(fd, False)
    size = 0
    try:
        while True:
            size += os.write(fd, b"#" * 4096)
    except BlockingIOError:
        os.set_blocking(fd, True)
        return size


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def test_lines_come_out_in_order_and_with_their_fields() -> None:
    with pipe() as (reader, writer):
        log = logs.Log(logs._Json(), writer)
        one = record("%d blocks of %s", 3, "engine")
        one.fields = {"event": "stored", "blocks": 3}
        log.handle(one)
        try:
            raise ValueError("a bug")
        except ValueError:
            failed = logging.LogRecord("x", logging.ERROR, __file__, 1, "it failed", None, sys.exc_info())
        log.handle(failed)
        log.stop()
        first, second = map(json.loads, read_lines(reader, 2))
    written = datetime.fromisoformat(first["time"].replace("Z", "+00:00"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", first["time"]), "RFC 3339, in UTC"
    assert abs((written - datetime.now(timezone.utc)).total_seconds()) < 60
    assert first | {"time": ""} == {
        "time": "",
        "level": "INFO",
        "message": "3 blocks of engine",
        "event": "stored",
        "blocks": 3,
    }
    assert (second["message"], second["traceback"].splitlines()[-1]) == ("it failed", "ValueError: a bug")


def test_an_unread_pipe_costs_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED", 4)
    with pipe() as (reader, writer):
        filled = fill(writer)
        log = logs.Log(TEXT, writer)
        done = threading.Event()

        def flood() -> None:
            for number in range(100):
                log.handle(record(f"line {number}"))  # each line is of a kind of its own
            done.set()

        threading.Thread(target=flood, daemon=True).start()
        assert done.wait(WAIT_S), "the caller of the log never waits"
        assert 95 <= log.lost_lines <= 96, "four wait, one may be with the writer"
        lost = log.lost_lines
        while filled:
            filled -= len(os.read(reader, filled))
        log.stop()
        pattern = r"WARNING lines of the log that were lost: (\d+) \(they came faster than they could be written\)"
        told = re.findall(pattern, os.read(reader, 65536).decode())
        assert sum(map(int, told)) == lost
    assert log.figures() == {"log_lost_lines": lost, "log_left_out_lines": 0, "log_problem": ""}


def test_a_full_disk_costs_lines_and_the_log_says_so_when_it_has_room() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pipe() as (reader, writer):
        log = logs.Log(TEXT, full)
        for number in range(1, 4):  # the line about the first loss is lost with the second
            log.handle(record("lost"))
            wait_until(lambda count=number: log.lost_lines == count)
        assert log.problem == "No space left on device"
        os.dup2(writer, full)  # now there is room
        log.handle(record("kept"))
        lost = "WARNING lines of the log that were lost: 3 (No space left on device)"
        assert read_lines(reader, 2) == [lost, "INFO kept"]
        log.stop()
        assert log.figures() == {"log_lost_lines": 3, "log_left_out_lines": 0, "log_problem": ""}
    os.close(full)


@pytest.mark.parametrize(("under_systemd", "start"), [(False, ""), (True, "<4>")])
def test_one_record_is_one_line_whatever_others_have_called_themselves(under_systemd: bool, start: str) -> None:
    name = "a\n2026-01-01 ERROR the disk is lost\x1b[2J"
    text = logs._Text(under_systemd).format(record("session %s", name, level=logging.WARNING))
    assert text.startswith(start)
    assert text.endswith("session a\\n2026-01-01 ERROR the disk is lost\\x1b[2J")
    assert text.isprintable()


def test_more_of_the_same_is_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = logs.Repetitions()
    admitted = [alike.admit(record("block %d is bad", number), 5.0) for number in range(logs.MAX_ALIKE + 7)]
    assert admitted == [True] * logs.MAX_ALIKE + [False] * 7
    assert alike.admit(record("another"), 5.0), "a kind is the text before its values are filled in"
    assert alike.ended(6.0) == []
    [told] = alike.ended(5.0 + logs.ALIKE_S)
    assert told.getMessage() == f"7 more lines like this one were left out: block {logs.MAX_ALIKE + 6} is bad"
    assert (alike.left_out_lines, alike.admit(record("block %d is bad", 1), 16.0)) == (7, True)
    monkeypatch.setattr(logs, "MAX_KINDS", 4)
    for number in range(3 * logs.MAX_ALIKE):
        alike.admit(record(f"line {number}"), 20.0)
    assert len(alike._kinds) <= 5, "texts that differ each time take no more memory"
