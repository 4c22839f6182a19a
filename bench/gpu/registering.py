"""The arena's memory files registered with CUDA: by two processes at once, how fast, and if the daemon dies."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from gpu.place import DEVICE, GIB, MIB, REHEARSAL, ROOT, sized, stand_ins, synchronize
from gpu.tell import Skip, checking, fact, figure, left_s, need

SMALL = sized(4 * GIB, 64 * MIB)
LARGE = sized(64 * GIB, 128 * MIB)
LARGE_NEEDS_S = sized(45, 5)


def run(arguments: Sequence[str]) -> None:
    """The parent's part; `client ADDRESS` is one of the two processes."""
    stand_ins()
    if arguments:
        client(arguments[1])
        return
    with checking("one region: mapped, filled, registered, copied from and to"):
        one_region()
    with checking(f"two processes register {SMALL // MIB} MiB, and the daemon dies"):
        two_processes(SMALL, "small")
    from tiercache.copies.arena import available_bytes

    large = min(LARGE, available_bytes() // 2) // GIB * GIB if not REHEARSAL else LARGE
    with checking(f"two processes register {large // MIB} MiB, and the daemon dies"):
        need(LARGE_NEEDS_S)
        if large <= SMALL:
            raise Skip(f"{available_bytes() // GIB} GiB of memory are available")
        two_processes(large, "large")


def one_region() -> None:
    import numpy as np
    import torch

    from tiercache.copies.arena import Region, create_region
    from tiercache.copies.host_memory import HostMemory

    start = time.perf_counter()
    fd = create_region(SMALL)
    figure("allocating a region", SMALL / (time.perf_counter() - start) / GIB, "GiB/s")
    region, memory = Region(0, fd, SMALL), HostMemory()
    os.close(fd)
    start = time.perf_counter()
    fact("populated", region.populate())
    figure("mapping and populating it", SMALL / (time.perf_counter() - start) / GIB, "GiB/s")
    start = time.perf_counter()
    memory.register(region.address, SMALL)
    took = time.perf_counter() - start
    figure("registering it", SMALL / took / GIB, "GiB/s")
    fact("mapped in place", memory.registered.mapped_in_place)
    host = torch.from_numpy(np.frombuffer(region.view(0, 64 * MIB), dtype=np.uint8))
    noise = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8, device=DEVICE)
    host.copy_(noise, non_blocking=True)
    synchronize()
    back = torch.empty_like(noise)
    back.copy_(host, non_blocking=True)
    synchronize()
    assert torch.equal(back, noise), "the bytes that came back differ"
    assert REHEARSAL or host.is_pinned(), "torch does not see that the memory is registered"
    start = time.perf_counter()
    memory.unregister(region.address)
    figure("unregistering it", SMALL / (time.perf_counter() - start) / GIB, "GiB/s")
    del host
    region.unmap()


def two_processes(size: int, label: str) -> None:
    """Both map and register one arena; then its daemon is killed under them."""
    import tiercache
    from tiercache.client.client import Client

    begin = time.perf_counter()
    with tiercache.launch(size, timeout_s=min(60.0, left_s())) as daemon:
        with Client.connect(daemon.address, map_arena=False, request_timeout_s=10.0) as looking:
            while (arena := looking.stats()["arena"])["populated_bytes"] < arena["bytes"]:
                need(5)
                time.sleep(0.05)
        figure(f"{label}: the daemon has its memory after", time.perf_counter() - begin, "s")
        clients = [Process(str(daemon.address)) for _ in range(2)]
        try:
            ready = [one.said() for one in clients]
            for one in ready:
                assert one["form"] == "cuda", f"the arena is held by {one['form']!r}: it could not be registered"
            worst = max(one["seconds"] for one in ready)
            figure(f"{label}: both have registered {size // MIB} MiB after", worst, "s")
            figure(f"{label}: that is, for each", size / worst / GIB, "GiB/s")
            killed = time.perf_counter()
            os.kill(daemon.pid, signal.SIGKILL)
            for one in clients:
                assert one.said()["left"] == 0, "some memory stays registered"
            figure(f"{label}: both have given it back after the daemon's death", time.perf_counter() - killed, "s")
            for one in clients:
                assert one.process.wait(20) == 0, f"a client ended with {one.process.returncode}"
        finally:
            for one in clients:
                one.end()


class Process:
    """One of the two clients, and what it says."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--part", "registering", "client", address]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def said(self) -> dict[str, Any]:
        """The next object that it prints."""
        while True:
            try:
                line = self._lines.get(timeout=max(left_s() - 5, 1))
            except queue.Empty:
                raise TimeoutError("a client said nothing in time") from None
            if not line:
                raise RuntimeError(f"a client ended with status {self.process.wait(10)}")
            if line.startswith("{"):
                return dict(json.loads(line))
            print(line, end="")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


def client(address: str) -> None:
    """Register the arena, copy from it, and give it back when the daemon is gone."""
    import torch

    from tiercache.client.client import Client
    from tiercache.copies.host_memory import process_memory

    if not REHEARSAL:
        torch.zeros(1, device=DEVICE)  # a context costs half a second, which is not the arena's
    begin = time.perf_counter()
    with Client.connect(address, cuda=True, request_timeout_s=5.0) as here:
        total = here.stats()["arena"]["bytes"]
        arena = here.session().arena
        assert arena is not None
        while arena._populating or sum(one.size_bytes for one in list(arena._regions.values())) < total:
            time.sleep(0.01)
        tell(form=arena.registration, seconds=time.perf_counter() - begin)
        region = next(iter(arena._regions.values()))
        bytes_of = (ctypes.c_char * MIB).from_address(region.address)
        host = torch.frombuffer(bytes_of, dtype=torch.uint8)
        assert torch.equal(host.to(DEVICE).cpu(), host)
        while here.alive:
            time.sleep(0.005)
        while arena._regions and left_s() > 10:
            time.sleep(0.005)
        tell(left=len(process_memory.registered.starts))
    assert float(torch.ones(8, device=DEVICE).sum()) == 8.0


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)
