"""What Mooncake takes as a shared store over TCP, against a plain loop over a socket.

    python bench/bench_shared_mooncake.py             # as root: in a network namespace of its own

Besides this process there are Mooncake's master, the helper process of a host that gives the pool its memory, that of
the measured host, which gives none, and a peer that sends and receives as many bytes without any protocol. So every
value crosses a socket. The sides take turns; figures are ratios of the medians.

Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench_shared import Plain, plain_peer
from shared_stores import BODY_BYTES, HEAD_BYTES, VALUES, Side, area, report, take_turns

from tiercache.daemon.tiers.shared.stores.mooncake.store import pooled_memory
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get, Put, StoreError

PORT = 50051
LINES = 4
START_S = 60.0
CALL_S = 60.0
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def missing() -> str:
    """Why it cannot be measured here; empty if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "no Mooncake: pip install mooncake-transfer-engine-non-cuda"
    tried = subprocess.run([_master(), "--version"], capture_output=True, text=True)
    if "cannot open shared object file" in tried.stderr:
        return "Mooncake does not start: apt-get install libibverbs1 librdmacm1 libnuma1"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "no network namespace, without which Mooncake listens to all networks: run it as root"
    return ""


def _master() -> Path:
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "mooncake_master"


@contextmanager
def master() -> Iterator[None]:
    """Mooncake's master; only where there is no other network."""
    process = subprocess.Popen([_master(), f"--rpc_port={PORT}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Host:
    """Moves the values of a round over some lines at once. What was put is deleted after each round, untimed."""

    def __init__(self, name: str, lines: list[Connection]) -> None:
        self._name = name
        self._lines = lines
        self._written, self._read = area(), area()
        self._round = 0

    def put(self) -> None:
        self._round += 1
        self._at_once(self._put_some)

    def get(self) -> None:
        self._at_once(self._get_some)

    def clean(self) -> None:
        self._lines[0].delete([self._key(number) for number in range(VALUES)], time.monotonic() + CALL_S)

    def check(self) -> None:
        assert self._written == self._read

    def _put_some(self, line: Connection, numbers: range) -> None:
        head = bytes(HEAD_BYTES)
        puts = [Put(self._key(number), [head, _body(self._written, number)]) for number in numbers]
        line.put(puts, [], time.monotonic() + CALL_S)
        assert all(one.fate is Fate.DONE for one in puts)

    def _get_some(self, line: Connection, numbers: range) -> None:
        head = memoryview(bytearray(HEAD_BYTES))
        gets = [Get(self._key(number), head, _body(self._read, number)) for number in numbers]
        line.get(gets, [], time.monotonic() + CALL_S)
        assert all(one.fate is Fate.DONE and one.body_bytes == BODY_BYTES for one in gets)

    def _at_once(self, move: Callable[[Connection, range], None]) -> None:
        each = VALUES // len(self._lines)
        shares = [range(start, start + each) for start in range(0, VALUES, each)]
        threads = [
            threading.Thread(target=move, args=(line, share))
            for line, share in list(zip(self._lines, shares, strict=True))[1:]
        ]
        for thread in threads:
            thread.start()
        move(self._lines[0], shares[0])
        for thread in threads:
            thread.join()

    def _key(self, number: int) -> bytes:
        return f"tc1:bench:{self._name}:{self._round}:{number}".encode()


class PutSide(Side):
    """Puts, whose values are deleted after each round."""

    def __init__(self, name: str, host: Host, child_pid: int) -> None:
        super().__init__(name, host.put, child_pid)
        self._host = host

    def round(self) -> None:
        super().round()
        self._host.clean()


def _body(view: memoryview, number: int) -> memoryview:
    return view[number * BODY_BYTES : (number + 1) * BODY_BYTES]


def _ready(line: Connection) -> Connection:
    """Wait until the store answers."""
    until_s = time.monotonic() + START_S
    while True:
        try:
            line.exists([b"tc1:bench"], [], time.monotonic() + 5)
        except StoreError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
        else:
            return line


def measure() -> dict[str, float]:
    """In a network of its own. Figures by name."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    url = f"mooncake://127.0.0.1:{PORT}?buffer=16MiB&segment="
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tiercache-bench-"))
        port = stack.enter_context(plain_peer(folder))
        stack.enter_context(master())
        giver, store = pooled_memory(url + "512MiB"), pooled_memory(url + "0")
        for one in (giver, store):
            stack.callback(one.close)
        _ready(giver.connect())
        one_line = Host("one", [_ready(store.connect())])
        four_lines = Host("four", [_ready(store.connect()) for _ in range(LINES)])
        pid = int(str(store.stats()["pid"]))
        place = socket.AF_INET, ("127.0.0.1", port)
        plain_put, plain_get = (
            Plain([_body(view, number) for number in range(VALUES)], place) for view in (area(), area())
        )
        hosts = {"store": one_line, f"{LINES} lines": four_lines}
        puts = [Side("plain", plain_put.put), *(PutSide(name, host, pid) for name, host in hosts.items())]
        take_turns(puts)
        for host in hosts.values():
            host.put()
        gets = [Side("plain", plain_get.get), *(Side(name, host.get, pid) for name, host in hosts.items())]
        take_turns(gets)
        for host in hosts.values():
            host.check()
        figures = report("Mooncake, TCP", "mooncake", puts, gets)
        for way, sides in (("put", puts), ("get", gets)):
            figures[f"mooncake_four_{way}_over_plain_2m"] = round(sides[2].gb_per_s() / sides[0].gb_per_s(), 3)
        return figures


def measure_mooncake() -> dict[str, float]:
    """In a process with a network of its own; no figures, and a line that says why, where that cannot be."""
    why = missing()
    if why:
        print(f"Mooncake is not measured: {why}")
        return {}
    command = ["unshare", "--net", sys.executable, __file__, "--inside"]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    table, _, figures = told.strip().rpartition("\n")
    print(table)
    found: dict[str, float] = json.loads(figures)
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        print(json.dumps(measure()))
    else:
        print(json.dumps(measure_mooncake()))
