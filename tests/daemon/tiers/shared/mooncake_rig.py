"""A real master of Mooncake for tests, in a network of the test's own.

Mooncake's processes listen on all interfaces, and let every process that connects read and write what they share. So
they run where nothing else is: a network namespace with nothing but a loopback device.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import state_of, wait_until

PORT = 50051
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


@contextmanager
def own_network() -> Iterator[None]:
    """Meanwhile this thread, and the threads and processes that it starts, have a network without others."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWNET):
            pytest.skip(f"no network namespace: {os.strerror(ctypes.get_errno())} (needs root)")
        try:
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
            yield
        finally:
            assert libc.setns(before, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(before)


class MooncakeMaster:
    """`mooncake_master`; only in `own_network`."""

    def __init__(self, folder: Path) -> None:
        found = importlib.util.find_spec("mooncake")
        binaries = [Path(place) / "mooncake_master" for place in (found and found.submodule_search_locations) or []]
        if found is None or not binaries[0].is_file():
            pytest.skip("no Mooncake: pip install mooncake-transfer-engine-non-cuda")
        tried = subprocess.run([binaries[0], "--version"], capture_output=True, text=True)
        if "cannot open shared object file" in tried.stderr:
            pytest.skip(f"apt-get install libibverbs1 librdmacm1 libnuma1: {tried.stderr.strip()}")
        self._binary = binaries[0]
        self.log = folder / "master.log"
        self.process: subprocess.Popen[bytes] | None = None

    def url(self, segment: str = "64MiB", more: str = "") -> str:
        return f"mooncake://127.0.0.1:{PORT}?segment={segment}&buffer=16MiB{more}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                # A client that has died counts as alive for so many seconds.
                [self._binary, f"--rpc_port={PORT}", "--client_ttl=2", "--default_kv_lease_ttl=100"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def serves() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", PORT)) == 0

        wait_until(serves, "mooncake_master")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile it accepts connections and answers nothing."""
        assert self.process is not None
        pid = self.process.pid
        self.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: state_of(pid) == "T", "the master to stop")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
