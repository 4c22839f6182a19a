"""Runs a command on a pseudo-terminal of some size, and reads what it shows there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 30.0
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")
_HOME = "\x1b[H"


class Terminal:
    """Runs a command with a terminal for stdin, stdout and stderr."""

    def __init__(self, command: list[str], columns: int = 80, lines: int = 24) -> None:
        self._master, slave = pty.openpty()
        self._resize(slave, columns, lines)
        self.before = termios.tcgetattr(slave)
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.child = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env={**env, "TERM": "xterm"}, start_new_session=True
        )
        self._slave = slave
        self.text = ""

    def _resize(self, fd: int, columns: int, lines: int) -> None:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        """Resize the terminal, and tell the command as a terminal does."""
        self._resize(self._master, columns, lines)
        self.child.send_signal(signal.SIGWINCH)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            self.text += os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            return False
        return True

    def frames(self) -> list[list[str]]:
        """Whole frames so far, as lines without colours."""
        parts = self.text.split(_HOME)[1:-1]
        return [_CODES.sub("", part).split("\n") for part in parts]

    def _last(self) -> list[str]:
        """The frame that is being drawn; the final one once nothing more comes."""
        return _CODES.sub("", self.text.split(_HOME)[-1]).split("\n")

    def until(self, condition: Callable[[list[str]], Any], what: str) -> list[str]:
        """The first frame from now on for which the condition holds."""
        seen, deadline_s = len(self.frames()), time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            frames = self.frames()
            for frame in frames[seen:]:
                if condition(frame):
                    return frame
            seen = len(frames)
            assert self.child.poll() is None, f"{what}: it has ended: {self.text[-500:]}"
            if not self._read(0.5) and condition(self._last()):
                return self._last()
        shown = "\n".join(self.frames()[-1]) if self.frames() else self.text[-1000:]
        raise AssertionError(f"{what}: not within {WAIT_S} s; on the screen:\n{shown}")

    def shows(self, words: str) -> list[str]:
        """The first frame from now on with these words."""
        return self.until(lambda lines: words in "\n".join(lines), words)

    def wait(self) -> int:
        """The exit status."""
        deadline_s = time.monotonic() + WAIT_S
        while self.child.poll() is None and time.monotonic() < deadline_s:
            self._read(0.1)
        return self.child.wait(timeout=1)

    def restored(self) -> bool:
        """Whether the terminal is as it was: its modes, and its screen."""
        while self._read(0):
            pass
        return bool(termios.tcgetattr(self._slave) == self.before) and self.text.rstrip().endswith(
            ("\x1b[?1049l", "\x1b[?25h")
        )

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self._slave)
        os.close(self._master)
