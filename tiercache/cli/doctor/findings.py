"""Findings of `tiercache doctor`: lines with a state, a figure and a remedy, and the host they are about."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tiercache.copies.arena import Beside


class State(str, Enum):
    """The state of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slower, or it may fail in time."""
    FAILURE = "failure"
    """It does not work."""
    NOT_APPLICABLE = "not applicable"


class Finding(NamedTuple):
    """One line. `remedy` says what to do; empty if there is nothing to do."""

    topic: str
    name: str
    state: State
    figure: str
    remedy: str = ""


def ok(topic: str, name: str, figure: str) -> Finding:
    """All is well."""
    return Finding(topic, name, State.OK, figure)


def warning(topic: str, name: str, figure: str, remedy: str) -> Finding:
    """Something to look at."""
    return Finding(topic, name, State.WARNING, figure, remedy)


def failure(topic: str, name: str, figure: str, remedy: str) -> Finding:
    """Something that does not work."""
    return Finding(topic, name, State.FAILURE, figure, remedy)


def skipped(topic: str, name: str, figure: str) -> Finding:
    """Nothing to look at here."""
    return Finding(topic, name, State.NOT_APPLICABLE, figure)


@dataclass(frozen=True)
class Needs:
    """What the daemon takes of this host: the running daemon, or a daemon with the settings that would apply here.

    Attributes:
        beside: processes whose memory counts beside the arena.
        pid: process of the running daemon; 0 for none.
        fds: descriptors at its limits: regions, sessions with their pidfds and connections, segment files.
    """

    arena_bytes: int
    lock_memory: str
    fds: int
    nvme_dirs: tuple[Path, ...]
    nvme_bytes: int
    pid: int = 0
    beside: Beside = field(default_factory=Beside)


@dataclass(frozen=True)
class Host:
    """Folders in which the kernel reports; tests use their own."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    def read(self, path: Path | str) -> str:
        """The content of a small kernel file; empty if there is none."""
        try:
            return (Path(path)).read_text().strip()
        except OSError:
            return ""

    def process(self, needs: Needs) -> Path:
        """The file of the daemon's own limits if it may be read, else that of this process."""
        own = self.proc / "self"
        process = self.proc / str(needs.pid)
        return process if needs.pid and os.access(process / "limits", os.R_OK) else own


def limit_of(text: str, name: str) -> tuple[int | None, int | None]:
    """Soft and hard limit of a line of /proc/PID/limits; None for unlimited, and where the line is missing."""
    for line in text.splitlines():
        if line.startswith(name):
            soft, hard = line[len(name) :].split()[:2]
            return (None if soft == "unlimited" else int(soft)), (None if hard == "unlimited" else int(hard))
    return None, None


def collect(topic: str, checks: Iterable[Callable[[], Iterable[Finding]]]) -> list[Finding]:
    """The findings of all checks; a check that fails itself becomes a finding too, and does not stop the others."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check()
        except (OSError, ValueError) as error:
            name = getattr(check, "__name__", "check").strip("_").replace("_", " ")
            found.append(warning(topic, name, f"could not be examined: {error}", "check that you may read it"))
    return found


def as_tree(found: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings for JSON."""
    return [{**one._asdict(), "state": one.state.value} for one in found]
