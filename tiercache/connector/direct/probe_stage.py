"""One stage of the probe, in a process of its own: moves bytes between a file and memory, and measures rates.

    read    file ─► device (kvikio)            against  file ─► page-locked memory ─► device
    write   device ─► file (kvikio)            against  device ─► page-locked memory ─► file

Prints one line of JSON. See `tiercache.connector.direct.probe`, which runs this and may kill it.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tiercache.connector.direct.probe import DeviceBytes, Mode, file_name

FILE_BYTES = 64 << 20
PIECE_BYTES = 2 << 20
THREADS = 8
ROUNDS = 3


def _main(mode: Mode, directory: str) -> None:
    """Run a stage and print one line of JSON."""
    try:
        with _test_file(directory) as path:
            found = _measure_host(path) if mode is Mode.POSIX else _measure_device(path)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        found = {"error": _text_of(error)}
    print(json.dumps(found), flush=True)


def _text_of(error: Exception) -> str:
    text = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) and error.filename else str(error)
    return " ".join(text.split())[:300] or type(error).__name__


@contextmanager
def _test_file(directory: str) -> Iterator[str]:
    """A file of random pages, on the disk and not in the page cache."""
    path = file_name(directory, os.getpid())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, PIECE_BYTES) as area:
            for offset in range(0, FILE_BYTES, PIECE_BYTES):
                area[:] = os.urandom(4096) * (PIECE_BYTES // 4096)
                os.pwritev(fd, [area], offset)
        os.fsync(fd)
        yield str(path)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _rate(move: Callable[[int, int], None], finish: Callable[[], None] = lambda: None) -> float:
    """Bytes per second of the best round; THREADS threads call `move(worker, offset)` for each piece."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        problems: list[Exception] = []

        def work(worker: int, problems: list[Exception] = problems) -> None:
            try:
                for offset in range(worker * PIECE_BYTES, FILE_BYTES, THREADS * PIECE_BYTES):
                    move(worker, offset)
            except (OSError, RuntimeError, ValueError) as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(THREADS)]
        start_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        finish()
        best_s = min(best_s, time.perf_counter() - start_s)
    return FILE_BYTES / best_s


def _read_piece(fd: int, view: Any, offset: int) -> None:
    if os.preadv(fd, [view], offset) != PIECE_BYTES:
        raise OSError("a direct read came back short")


def _measure_host(path: str) -> dict[str, Any]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    areas = [mmap.mmap(-1, PIECE_BYTES) for _ in range(THREADS)]
    try:
        return {"host": _rate(lambda worker, offset: _read_piece(fd, areas[worker], offset))}
    finally:
        os.close(fd)


def _measure_device(path: str) -> dict[str, Any]:
    """Measure both ways into device memory and out of it, and whether the bytes agree."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("no cuda: torch finds no device")
    device = _Device(torch, importlib.import_module("kvikio"), path)
    try:
        found = {"direct": _rate(device.read), "bounce": _rate(device.bounce_in, torch.cuda.synchronize)}
        if not device.agrees(0):
            raise RuntimeError("what cuFile read into device memory are not the bytes of the file")
        return {**found, **_measure_writes(device)}
    finally:
        device.close()


def _measure_writes(device: _Device) -> dict[str, Any]:
    """Measure writes from device memory; `write_error` if they do not work though reads do."""
    try:
        device.open_to_write()
        direct = _rate(device.write)
        _rate(device.bounce_in)
        if not device.agrees(PIECE_BYTES):
            raise RuntimeError("what cuFile wrote are not the bytes in device memory")
        return {"direct_write": direct, "bounce_write": _rate(device.bounce_out), "write_error": ""}
    except (OSError, RuntimeError, ValueError) as error:
        return {"direct_write": 0.0, "bounce_write": 0.0, "write_error": _text_of(error)}


class _Device:
    """The file's bytes in device memory: in `_direct` as cuFile has read them, in `_bounced` through host memory."""

    def __init__(self, torch: Any, kvikio: Any, path: str) -> None:
        self._torch = torch
        self._kvikio = kvikio
        self._path = path
        self._direct = torch.zeros(FILE_BYTES, dtype=torch.uint8, device="cuda")
        self._bounced = torch.empty(FILE_BYTES, dtype=torch.uint8, device="cuda")
        self._pinned = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(THREADS)]
        torch.cuda.synchronize()
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        self._files = [kvikio.CuFile(path, "r")]

    def open_to_write(self) -> None:
        self._files.append(self._kvikio.CuFile(self._path, "r+"))

    def close(self) -> None:
        for file in self._files:
            file.close()
        os.close(self._fd)

    def read(self, worker: int, offset: int) -> None:
        target = DeviceBytes(self._direct.data_ptr() + offset, PIECE_BYTES)
        if self._files[0].raw_read(target, PIECE_BYTES, offset) != PIECE_BYTES:
            raise OSError("a read by cuFile came back short")

    def bounce_in(self, worker: int, offset: int) -> None:
        _read_piece(self._fd, memoryview(self._pinned[worker].numpy()), offset)
        self._bounced[offset : offset + PIECE_BYTES].copy_(self._pinned[worker])

    # A piece is written with the bytes read from the next one, so that a write makes a difference.

    def write(self, worker: int, offset: int) -> None:
        begin = (offset + PIECE_BYTES) % FILE_BYTES
        source = DeviceBytes(self._direct.data_ptr() + begin, PIECE_BYTES)
        if self._files[1].raw_write(source, PIECE_BYTES, offset) != PIECE_BYTES:
            raise OSError("a write by cuFile came back short")

    def bounce_out(self, worker: int, offset: int) -> None:
        begin = (offset + PIECE_BYTES) % FILE_BYTES
        self._pinned[worker].copy_(self._direct[begin : begin + PIECE_BYTES])
        if os.pwritev(self._fd, [memoryview(self._pinned[worker].numpy())], offset) != PIECE_BYTES:
            raise OSError("a direct write came back short")

    def agrees(self, shift: int) -> bool:
        """True if byte `i` of the bounced bytes is byte `i + shift` of what cuFile has read, with wrap-around."""
        end, equal = FILE_BYTES - shift, self._torch.equal
        head = equal(self._bounced[0:end], self._direct[shift:FILE_BYTES])
        return bool(head and equal(self._bounced[end:FILE_BYTES], self._direct[0:shift]))


if __name__ == "__main__":
    _main(Mode(sys.argv[1]), sys.argv[2])
