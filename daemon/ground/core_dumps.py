"""Core dumps: a daemon that has secrets leaves none, and neither does a process that it starts.

RLIMIT_CORE of 0 bytes keeps the kernel from writing a file, but not from giving the dump to the program that
`kernel.core_pattern` may name (systemd-coredump, apport). A limit of 1 byte keeps it from both (core(5)).
"""

from __future__ import annotations

import logging
import resource
from pathlib import Path

log = logging.getLogger("tiercache.daemon")

NO_DUMP_BYTES = 1
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


def leave_none() -> None:
    """From here on this process leaves no core dump, nor does one that it starts. The limit cannot be raised again."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (NO_DUMP_BYTES, NO_DUMP_BYTES))
    except (OSError, ValueError):  # a hard limit of 0 bytes, which only root may raise: no file is written
        if _may_go_to_a_program():
            log.warning(
                "the program that kernel.core_pattern names may get core dumps of the daemon, with keys in them: their "
                "limit is 0 bytes, which does not keep the kernel from that; start the daemon with one of 1 byte "
                "(LimitCORE=1, ulimit -c 1)"
            )


def _may_go_to_a_program() -> bool:
    try:
        return CORE_PATTERN.read_text().startswith("|")
    except OSError:  # a sandbox that hides it
        return True
