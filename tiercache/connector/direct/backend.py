"""Direct reads and writes between files and the memory of a pool's blocks: the interface, and GPUDirect Storage.

    KvikioBackend   device memory, by GPUDirect Storage (kvikio); only after a probe has passed

kvikio is imported when the first KvikioBackend is made, never before: opened where GPUDirect does not work it can spin
forever, which is why `tiercache.connector.direct.probe` tries it in another process first.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tiercache.connector.direct.probe import DeviceBytes, GdsProbe, Mode, kvikio_environment
from tiercache.copies.copy_plan import Addresses
from tiercache.copies.cuda_driver import beside_captures
from tiercache.errors import ConfigError, TierCacheError

PAGE_BYTES = 4096
RAW = 0
"""The codec of blocks that are stored raw."""


class DirectFailed(TierCacheError):
    """Blocks could not be read, written or verified directly. The target holds anything."""


class Backend(Protocol):
    """Reads and writes files. All methods may be called from several threads; the blocking ones say so.

    `name` is for people. Files are whatever `open` returns. Raise DirectFailed and nothing else.
    """

    name: str

    def open(self, path: str, writing: bool) -> Any:
        """Open a segment file for reading, or for writing in place. Blocks."""

    def close(self, file: Any) -> None:
        """Close it; no I/O on it is in progress."""

    def read(self, file: Any, offset: int, address: int, length: int) -> int:
        """Read bytes `offset ..< offset + length` to `address`; returns how many came.

        Offset and length are multiples of 4096. Blocks until nothing of this read is in progress any more, also when it
        fails.
        """

    def write(self, file: Any, offset: int, address: int, length: int) -> int:
        """As `read`, the other way; returns how many bytes went."""

    def is_ready(self, after: Any) -> bool:
        """True if the work marked by `Copier.mark` is over, so that blocks may be read and overwritten."""

    def lane_sums(self, addresses: Addresses, length: int) -> list[int]:
        """`tiercache.protocol.checksums.lane_sum` of the block at each address. Blocks."""


class KvikioBackend:
    """GPUDirect Storage through kvikio, into memory of one CUDA device.

    Args:
        probe: result of another process; one that did not pass raises ConfigError.
        device: as torch writes it, e.g. `cuda:0`.

    Raises ConfigError too when kvikio, torch or Triton cannot be used here.
    """

    def __init__(self, probe: GdsProbe, device: str) -> None:
        if probe.mode is Mode.POSIX:
            raise ConfigError(f"GPUDirect is not used on {probe.directory}: {probe.reason}")
        self.name = probe.mode.value
        self._device = device
        self._scratch = tempfile.TemporaryDirectory(prefix="tiercache-cufile-")  # for cuFile's log
        os.environ.update(kvikio_environment(probe.mode, self._scratch.name))
        try:
            self._kvikio: Any = importlib.import_module("kvikio")
            self._torch: Any = importlib.import_module("torch")
            self._sums: Any = importlib.import_module("tiercache.kernels.checksum").lane_sums
            with self._torch.cuda.device(device):
                self._stream = self._torch.cuda.Stream(device)
                # Compiled now: at the first load it would delay a request.
                trial = self._torch.zeros(PAGE_BYTES, dtype=self._torch.uint8, device=device)
                self._torch.cuda.synchronize(device)
            self.lane_sums(np.array([trial.data_ptr()], np.int64), PAGE_BYTES)
        except (ImportError, OSError, RuntimeError, ValueError, DirectFailed) as error:
            raise ConfigError(f"GPUDirect cannot be used in this process: {error}") from error

    def open(self, path: str, writing: bool) -> Any:
        """See `Backend`."""
        try:
            return self._kvikio.CuFile(path, "r+" if writing else "r")  # "w" would empty the file
        except (OSError, RuntimeError) as error:
            raise DirectFailed(f"{path} cannot be opened: {error}") from error

    def close(self, file: Any) -> None:
        """See `Backend`."""
        file.close()

    def read(self, file: Any, offset: int, address: int, length: int) -> int:
        """See `Backend`. One cuFileRead; the interpreter's lock is released meanwhile."""
        return self._move(file.raw_read, offset, address, length)

    def write(self, file: Any, offset: int, address: int, length: int) -> int:
        """See `Backend`. One cuFileWrite."""
        return self._move(file.raw_write, offset, address, length)

    @staticmethod
    def _move(call: Callable[[DeviceBytes, int, int], Any], offset: int, address: int, length: int) -> int:
        try:
            return int(call(DeviceBytes(address, length), length, offset))
        except (OSError, RuntimeError, ValueError) as error:  # kvikio's errors are texts without a number
            raise DirectFailed(f"{length} bytes at {offset}: {error}") from error

    def is_ready(self, after: Any) -> bool:
        """See `Backend`; `after` is an event, or None."""
        with beside_captures():
            return after is None or bool(after.query())

    def lane_sums(self, addresses: Addresses, length: int) -> list[int]:
        """See `Backend`: the kernel, on a stream of its own."""
        torch = self._torch
        try:
            with torch.cuda.device(self._device), beside_captures(), torch.cuda.stream(self._stream):
                table = torch.from_numpy(np.ascontiguousarray(addresses, np.int64)).to(self._device)
                sums = self._sums(table, length).cpu()
        except (RuntimeError, ValueError, OSError) as error:
            raise DirectFailed(f"blocks could not be verified on {self._device}: {error}") from error
        return [int(value) for value in sums.numpy().view(np.uint64)]
