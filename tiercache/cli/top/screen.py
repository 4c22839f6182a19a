"""The loop of `tiercache top`: reads statistics, draws a frame, waits for a key."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tiercache.cli.connection import connected
from tiercache.cli.exit_status import EXIT_OK
from tiercache.cli.readings import Reading, quiet_client, take_reading
from tiercache.cli.top.history import RecentReadings
from tiercache.cli.top.view import SORTS, ViewState, frame
from tiercache.errors import ConfigError

HOT_PREFIXES = 8
_ONCE_LINES = 60
_ONCE_COLUMNS = 100
_REMEDY = "top needs a terminal: use `tiercache stats --watch`, or `tiercache top --once` for one frame"


def show(address: str, interval_s: float, once: bool, sort: str) -> int:
    """Show the daemon until `q`, or print one frame. Raises ConfigError if there is no terminal."""
    if sort not in SORTS:
        raise ConfigError(f"--sort {sort}: must be one of: {', '.join(SORTS)}")
    # Without highlighting: all colours are set explicitly.
    console = Console(highlight=False, emoji=False, markup=False)
    if not once and (not console.is_terminal or console.is_dumb_terminal):
        raise ConfigError(_REMEDY)
    settings = ViewState(address, interval_s, sort)
    with quiet_client(), connected(address) as client:
        take = partial(take_reading, client, HOT_PREFIXES)
        if once:
            return _print_once(take, console, settings)
        with Keyboard() as keyboard:
            return _Top(take, console, keyboard, settings).run()


def _print_once(take: Callable[[], Reading], console: Console, settings: ViewState) -> int:
    """Rates need two readings, an interval apart."""
    history = RecentReadings()
    history.take(take())
    time.sleep(settings.interval_s)
    history.take(take())
    width = console.width if console.is_terminal else _ONCE_COLUMNS
    for line in frame(history, settings, width, _ONCE_LINES):
        if console.is_terminal:
            console.print(line, no_wrap=True)
        else:
            print(line.plain.rstrip())
    return EXIT_OK


class Keyboard:
    """Keys as they are struck, without echo, and notice of signals. Main thread only."""

    def __init__(self) -> None:
        self.stopped = False
        self.suspended = False
        self._fd = sys.stdin.fileno() if sys.stdin.isatty() else -1
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._wake, self._woken = os.pipe()
        for fd in (self._wake, self._woken):
            os.set_blocking(fd, False)

    def __enter__(self) -> Keyboard:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH):
            self._handlers[number] = signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake)
        os.close(self._woken)

    def listen(self) -> None:
        """Read keys one by one, without echo; Ctrl-C and Ctrl-Z keep their meaning."""
        if self._fd >= 0:
            tty.setcbreak(self._fd, termios.TCSADRAIN)

    def leave(self) -> None:
        """Restore the terminal."""
        if self._before:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.suspended = self.suspended or number == signal.SIGTSTP
        self.stopped = self.stopped or number not in (signal.SIGTSTP, signal.SIGWINCH)

    def wait(self, seconds: float) -> str:
        """Keys struck; returns once there are any, a signal has come, or the time is over."""
        fds = [self._wake] + ([self._fd] if self._fd >= 0 else [])
        ready, _, _ = select.select(fds, [], [], max(0.0, seconds))
        if self._wake in ready:
            os.read(self._wake, 64)
        if self._fd not in ready:
            return ""
        struck = os.read(self._fd, 64)
        self.stopped = self.stopped or not struck  # the terminal is gone
        return struck.decode(errors="ignore")


class _Top:
    """The loop: read, draw, wait for a key."""

    def __init__(self, take: Callable[[], Reading], console: Console, keyboard: Keyboard, settings: ViewState) -> None:
        self._take = take
        self._console = console
        self._keyboard = keyboard
        self._settings = settings
        self._history = RecentReadings()

    def run(self) -> int:
        live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        next_s = time.monotonic()
        try:
            with live:
                while not self._keyboard.stopped:
                    if not self._settings.paused and time.monotonic() >= next_s:
                        self._history.take(self._take())
                        next_s = max(next_s + self._settings.interval_s, time.monotonic())
                    live.update(self._draw(), refresh=True)
                    wait_s = 3600.0 if self._settings.paused else next_s - time.monotonic()
                    for key in self._keyboard.wait(wait_s):
                        self._press(key)
                    if self._keyboard.suspended:
                        self._suspend(live)
        except OSError as error:
            # The terminal was closed during a write.
            print(f"tiercache: the terminal is gone: {error.strerror}", file=sys.stderr)
        return EXIT_OK

    def _draw(self) -> Group:
        width, height = self._console.size
        lines = frame(self._history, self._settings, width, height)
        return Group(*(Text(" ") if not line.plain else line for line in lines))

    def _press(self, key: str) -> None:
        settings = self._settings
        if settings.help:
            self._settings = settings._replace(help=False)
        elif key in "qQ":
            self._keyboard.stopped = True
        elif key in "pP ":
            self._settings = settings._replace(paused=not settings.paused)
        elif key in "sS":
            self._settings = settings._replace(sort=SORTS[(SORTS.index(settings.sort) + 1) % len(SORTS)])
        elif key in "?hH":
            self._settings = settings._replace(help=True)

    def _suspend(self, live: Live) -> None:
        """Ctrl-Z: restore the terminal, stop, and take it again when the shell continues this process."""
        live.stop()
        self._keyboard.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._keyboard.suspended = False
        self._keyboard.listen()
        live.start()
