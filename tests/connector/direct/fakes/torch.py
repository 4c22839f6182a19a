"""The part of torch that the probe uses, over host memory."""

from __future__ import annotations

import ctypes
import mmap

uint8 = "uint8"


class Tensor:
    def __init__(self, area: mmap.mmap, begin: int, end: int) -> None:
        self._area, self._begin, self._end = area, begin, end

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._area)) + self._begin

    def numpy(self) -> memoryview:
        return memoryview(self._area)[self._begin : self._end]

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(self._area, self._begin + part.start, self._begin + part.stop)

    def copy_(self, other: Tensor) -> None:
        self.numpy()[:] = other.numpy()


def empty(size: int, **_: object) -> Tensor:
    return Tensor(mmap.mmap(-1, size), 0, size)


zeros = empty


def equal(one: Tensor, other: Tensor) -> bool:
    return bytes(one.numpy()) == bytes(other.numpy())


class cuda:
    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def synchronize() -> None:
        return None
