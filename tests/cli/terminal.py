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

WAIT_S = 60.0
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")
_HOME = "\x1b[H"


class Terminal:
    """Runs a command with a terminal for stdin, stdout and stderr."""

    def __init__(self, command: list[str], columns: int = 80, lines: int = 24) -> None:
        self._master, self._slave = pty.openpty()
        self._resize(self._slave, columns, lines)
        self._before = termios.tcgetattr(self._slave)
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        streams: dict[str, Any] = {"stdin": self._slave, "stdout": self._slave, "stderr": self._slave}
        self.child = subprocess.Popen(command, env={**env, "TERM": "xterm"}, start_new_session=True, **streams)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._slave)
        os.close(self._master)

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
        self.text += os.read(self._master, 65536).decode(errors="replace")
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
            if not self._read(0.5):
                if condition(self._last()):
                    return self._last()
                assert self.child.poll() is None, f"{what}: it has ended: {self.text[-500:]}"
        raise AssertionError(f"{what}: not within {WAIT_S} s; on the screen:\n" + "\n".join(self._last()))

    def shows(self, words: str) -> list[str]:
        """The first frame from now on with these words."""
        return self.until(lambda lines: words in "\n".join(lines), words)

    def wait(self) -> int:
        """The exit status, once everything that the command prints is read."""
        deadline_s = time.monotonic() + WAIT_S
        while self.child.poll() is None and time.monotonic() < deadline_s:
            self._read(0.1)
        while self._read(0):
            pass
        return self.child.wait(timeout=WAIT_S)

    def restored(self) -> bool:
        """True if the terminal is as it was: its modes, and its screen."""
        return termios.tcgetattr(self._slave) == self._before and self.text.rstrip().endswith(
            ("\x1b[?1049l", "\x1b[?25h")
        )
