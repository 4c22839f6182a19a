"""What a disk gives to a plain loop: the limit that the NVMe tier is held against.

    python bench/disk_limit.py [--dir DIR]

As many threads as the tier has take the next block of a file that is allocated in full and move it
past the page cache, to and from shared memory as large as the file: `preadv` and `pwritev` with
O_DIRECT, one block a call, nothing else. By itself this prints both speeds, and fio's with the same
job where it is installed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MIB = 1 << 20
THREADS = 8

Call = Callable[[int, Sequence[memoryview], int], int]


class DiskLimit:
    """One file on the disk in question, and memory of the same size. Removed by `close`.

    The memory is not a few buffers used over and over: into such, some machines read at half the speed.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size = size_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, size_bytes)
        self._memory = memoryview(mmap.mmap(-1, size_bytes))
        for start in range(0, size_bytes, MIB):
            self._memory[start : start + MIB] = os.urandom(4096) * (MIB // 4096)
        self.write_gb_s(2 * MIB)  # a block's first write costs more than the later ones

    def write_gb_s(self, block_bytes: int) -> float:
        """Write the whole file once; returns the speed in GB/s."""
        return self._pass(os.pwritev, block_bytes)

    def read_gb_s(self, block_bytes: int) -> float:
        """Read the whole file once; returns the speed in GB/s."""
        return self._pass(os.preadv, block_bytes)

    def _pass(self, call: Call, block_bytes: int) -> float:
        blocks = iter(range(0, self._size, block_bytes))  # `next` is atomic, so each block goes to one thread
        threads = [threading.Thread(target=self._move, args=(call, blocks, block_bytes)) for _ in range(THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._size / (time.perf_counter() - start) / 1e9

    def _move(self, call: Call, blocks: Iterator[int], block_bytes: int) -> None:
        for start in blocks:
            moved = call(self._fd, [self._memory[start : start + block_bytes]], start)
            assert moved == block_bytes, "a transfer came back short"

    def close(self) -> None:
        """Remove the file."""
        os.close(self._fd)
        self._path.unlink()


def fio_gb_s(path: Path, size_bytes: int, block_bytes: int, direction: str) -> float | None:
    """What fio gets out of the disk with the same threads and sizes; None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    job = [
        "fio",
        "--name=limit",
        f"--filename={path}",
        f"--size={size_bytes}",
        f"--bs={block_bytes}",
        f"--rw={direction}",
        "--direct=1",
        "--ioengine=psync",
        "--thread",
        f"--numjobs={THREADS}",
        f"--io_size={size_bytes // THREADS}",
        f"--offset_increment={size_bytes // THREADS}",
        "--group_reporting",
        "--output-format=json",
    ]
    result = subprocess.run(job, capture_output=True, text=True, timeout=120, check=True)
    return float(json.loads(result.stdout)["jobs"][0][direction]["bw_bytes"] / 1e9)


def main() -> None:
    """Print the limits of one disk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("TMPDIR", ".")), help="a directory on the disk")
    where = Path(tempfile.mkdtemp(prefix="tiercache-disk-", dir=parser.parse_args().dir))
    try:
        disk = DiskLimit(where / "plain", 1 << 30)
        for block_bytes in (2 * MIB, 128 << 10):
            speeds = f"write {disk.write_gb_s(block_bytes):.2f} GB/s, read {disk.read_gb_s(block_bytes):.2f} GB/s"
            print(f"{block_bytes >> 10:5d} KiB, {THREADS} threads: {speeds}")
            for direction in ("write", "read"):
                fio = fio_gb_s(where / "plain", 1 << 30, block_bytes, direction)
                print(f"       fio {direction}: " + ("not installed" if fio is None else f"{fio:.2f} GB/s"))
        disk.close()
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    main()
