"""A kernel that refuses single system calls, as container runtimes and sandboxes do: the daemon serves without, says in
`health` what is missing, or ends with one line and status 2.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from chains import chain_of
from waiting import wait_until

import tiercache
from tiercache.daemon.ground.system_calls import check_calls, check_threads
from tiercache.errors import ConfigError, TierCacheError

BLOCKS, BLOCK_BYTES = 4, 65536
SPEC = tiercache.NamespaceSpec(engine="e/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=BLOCK_BYTES)

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class Call(NamedTuple):
    """A system call of x86-64; where `test` is set, only with an argument (its place) for which the test holds."""

    number: int
    place: int = 0
    test: int = 0
    value: int = 0


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def refusing(call: Call, error: int) -> Callable[[], None]:
    """What a child calls before exec, so that the kernel refuses a call from then on (seccomp(2), classic BPF)."""
    check = [(_LOAD, 0, 0, 16 + 8 * call.place), (call.test, 0, 1, call.value)] if call.test else []
    code = [(_LOAD, 0, 0, 0), (_EQUAL, 0, len(check) + 1, call.number), *check, (_RETURN, 0, 0, _ERRNO | error)]
    code.append((_RETURN, 0, 0, _ALLOW))
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    program = _Program(len(code), ctypes.cast(text, ctypes.c_void_p))
    prctl = ctypes.CDLL(None).prctl

    def refuse() -> None:
        if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
            os._exit(99)

    return refuse


ENDS = {
    "memfd_create": Call(319),
    "fallocate": Call(285),
    "fcntl(F_ADD_SEALS)": Call(72, 1, _EQUAL, 1033),
    "flock": Call(73),
    "eventfd2": Call(290),
    "epoll_create1": Call(291),
    "socketpair": Call(53),
    "sched_getscheduler": Call(145),
    "sched_getparam": Call(143),
    "sched_setscheduler": Call(144),
    "chmod": Call(90),
    "clone3": Call(435),
}
"""Nothing works without: one line that names the call, and status 2."""

DEGRADED = {
    "pidfd_open": Call(434),
    "setsid": Call(112),
    "fsync": Call(74),
    "fdatasync": Call(75),
    "fcntl(F_SETLK)": Call(72, 1, _EQUAL, 6),
}
"""A tier is missing, and `health` says so."""

SERVES = {
    "mlock": Call(149),
    "madvise": Call(28),
    "mbind": Call(237),
    "setpriority": Call(141),
    "getpriority": Call(140),
    "sched_setattr": Call(314),
    "sched_getaffinity": Call(204),
    "prctl": Call(157),
    "setrlimit": Call(160),
    "prlimit64": Call(302, 2, _ANY_BIT, 0xFFFFFFFF),
    "io_setup": Call(206),
    "io_submit": Call(209),
    "io_getevents": Call(208),
    "io_destroy": Call(207),
    "O_DIRECT": Call(257, 2, _ANY_BIT, os.O_DIRECT),
    "statx": Call(332),
    "linkat": Call(265),
    "utimensat": Call(280),
    "fcntl(F_OFD_SETLK)": Call(72, 1, _EQUAL, 37),
    "getrandom": Call(318),
    "mremap": Call(25),
    "kill": Call(62),
}
"""All works, slower at most."""

CALLS = {**ENDS, **DEGRADED, **SERVES}
FALLS_BACK = {("clone3", errno.ENOSYS)}
"""Here the C library uses another call."""
needs_seccomp = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the numbers of the calls are those of x86-64"
)


class Refused:
    """A daemon with every tier, in a process in which the kernel refuses a call."""

    def __init__(self, path: Path, call: Call, error: int) -> None:
        self.run_dir, self.log = path / "run", path / "log"
        for name in ("nvme", "shared"):
            (path / name).mkdir()
        flags = ["--arena", "4MiB", "--nvme", f"{path}/nvme", "--nvme-size", "64MiB", "--nvme-io", "aio"]
        flags += ["--shared", f"file://{path}/shared", "--shared-plain", "yes", "--grace", "0s"]
        command = [sys.executable, "-m", "tiercache.daemon", "--run-dir", str(self.run_dir), *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, preexec_fn=refusing(call, error))

    def figures(self) -> dict[str, Any]:
        """What it says of itself; empty while it does not answer."""
        assert self.process.poll() is None, self.text()
        try:
            with tiercache.Client.connect(self.run_dir, name="test", map_arena=False) as client:
                return client.stats()
        except TierCacheError:
            return {}

    def text(self) -> str:
        return self.log.read_text()

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=60)


def loaded(run_dir: Path) -> int:
    """Store blocks and load them again; how many came back, all with their bytes."""
    pool = np.zeros((2 * BLOCKS, BLOCK_BYTES), np.uint8)
    pool[:BLOCKS] = np.arange(1, BLOCKS + 1, dtype=np.uint8)[:, None]
    keys = chain_of("refused", BLOCKS)
    with tiercache.connect(run_dir, namespace=SPEC, pool=tiercache.Pool.from_blocks(pool), warn=False) as connector:
        wait_until(lambda: connector.available, "the daemon")
        connector.store(keys, list(range(BLOCKS)))
        count = connector.load(connector.match(keys), list(range(BLOCKS, 2 * BLOCKS)))
    assert (pool[BLOCKS : BLOCKS + count] == pool[:count]).all()
    return count


def is_full(tree: dict[str, Any]) -> bool:
    return bool(tree) and tree["arena"]["populated_bytes"] == tree["arena"]["bytes"]


def check(path: Path, name: str, error: int) -> None:
    daemon = Refused(path, CALLS[name], error)
    try:
        if name in ENDS and (name, error) not in FALLS_BACK:
            assert daemon.process.wait(timeout=60) == 2
            # Lines of the log, which a thread writes, may come after it.
            [line] = [line for line in daemon.text().splitlines() if line.startswith("tiercache daemon: ")]
            assert name in line
            assert "Traceback" not in daemon.text()
            return
        wait_until(lambda: is_full(daemon.figures()), "the arena")
        assert loaded(daemon.run_dir) == BLOCKS
        if name in DEGRADED:
            wait_until(lambda: daemon.figures().get("health", {}).get("reasons"), "a reason in health")
        else:

            def below() -> bool:
                tiers = daemon.figures().get("tiers", {})
                written = tiers.get("shared", {}).get("written_blocks")
                return bool(tiers) and (tiers["nvme"]["blocks"], written) == (BLOCKS, BLOCKS)

            wait_until(below, "the blocks in the tiers below")
            assert daemon.figures()["health"]["reasons"] == []
        assert daemon.end() == 0
        assert "Traceback" not in daemon.text()
    finally:
        daemon.process.kill()
        daemon.process.wait()


@needs_seccomp
@pytest.mark.parametrize("name", ["setpriority", "flock"])
def test_what_a_profile_refuses_is_done_without_or_named(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, errno.EPERM)


@needs_seccomp
@pytest.mark.stress
@pytest.mark.parametrize(("name", "error"), list(itertools.product(CALLS, [errno.EPERM, errno.ENOSYS])))
def test_each_call_that_a_profile_may_refuse(tmp_path: Path, name: str, error: int) -> None:
    check(tmp_path, name, error)


def test_the_operators_table_has_these_calls() -> None:
    """`daemon/deploy/README.md`: each call is in the row of what becomes of it."""
    text = (Path(tiercache.__file__).parent / "daemon/deploy/README.md").read_text()
    rows = re.findall(r"^\| ((?:`[^`|]+`(?:, )?)+) \| ([^|]+) \|$", text, re.MULTILINE)
    named = {call: effect for calls, effect in rows for call in re.findall(r"`([^`]+)`", calls)}
    ends = {call for call, effect in named.items() if effect.startswith("the daemon ends")}
    degraded = {call for call, effect in named.items() if "`health`" in effect}
    assert (ends, degraded) == (set(ENDS), set(DEGRADED))
    assert set(named) == set(CALLS)


def test_threads_that_cannot_be_started_are_counted(no_threads: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs 7 more threads, and the system allows it 0: raise the limit"):
        check_threads(7)
    no_threads.undo()
    check_threads(7)


def test_the_call_that_is_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    check_calls()
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ConfigError, match=r"refuses memfd_create \(Operation not permitted\): allow it in the seccomp"):
        check_calls()
