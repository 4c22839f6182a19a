"""Stand-ins for the CUDA driver, for machines without one."""

from __future__ import annotations

import ctypes

STREAM = 77
"""The handle of the only stream there is."""


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 12.8, written down a second time."""

    _fields_ = [(name, ctypes.c_uint) for name in ("order", "a_type", "a_id", "b_type", "b_id", "flags")]


class FakeLibrary:
    """A driver library whose copies are memmove, behind C function pointers of the real signatures.

    Like the real one it has no mercy on a copy that leaves the registration it begins in.

    Attributes:
        fail_at: number of the copy that fails.
        batches: the size of each batch.
        registrar: knows what is registered.
        capturing: whether the current stream is being captured into a CUDA graph.
        capture_mode: the one of the calling thread.
    """

    def __init__(self, fail_at: int = -1, has_batches: bool = True) -> None:
        self.registrar = FakeDriver()
        self.copies, self.fail_at, self.batches = 0, fail_at, list[int]()
        self.capturing = False
        integer, size, address, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
        nothing = ctypes.CFUNCTYPE(integer)(lambda: 0)
        self.cuInit = self.cuDeviceGetCount = self.cuDevicePrimaryCtxRetain = nothing
        self.cuDevicePrimaryCtxGetState = self.cuCtxPushCurrent_v2 = self.cuCtxPopCurrent_v2 = nothing
        self.cuMemHostRegister_v2 = self.cuMemHostUnregister = self.cuMemHostGetDevicePointer_v2 = nothing
        self.cuGetErrorName = ctypes.CFUNCTYPE(integer, integer, pointer)(self.name)
        self.capture_mode = 0
        self.cuThreadExchangeStreamCaptureMode = ctypes.CFUNCTYPE(integer, ctypes.POINTER(integer))(self.exchange)
        self.cuMemcpyAsync = ctypes.CFUNCTYPE(integer, address, address, size, pointer)(self.one)
        if has_batches:
            counts, addresses = ctypes.POINTER(size), ctypes.POINTER(address)
            kinds = ctypes.POINTER(Attributes)
            self.cuMemcpyBatchAsync = ctypes.CFUNCTYPE(
                integer, addresses, addresses, counts, size, kinds, counts, size, counts, pointer
            )(self.many)

    def name(self, code: int, text: int) -> int:
        self._error_name = ctypes.c_char_p(b"CUDA_ERROR_%d" % code)  # kept: the caller reads it after the return
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = self._error_name
        return 0

    def exchange(self, mode) -> int:  # type: ignore[no-untyped-def]
        mode[0], self.capture_mode = self.capture_mode, mode[0]
        return 0

    def one(self, target: int, source: int, length: int, stream: int) -> int:
        assert stream == STREAM
        for start, size in self.registrar.held.items():
            for end in (source, target):
                assert not start <= end < start + size or end + length <= start + size, "spans registrations"
        if self.copies == self.fail_at:
            return 1
        self.copies += 1
        ctypes.memmove(target, source, length)
        return 0

    def many(self, targets, sources, lengths, count, attributes, first, kinds, failed, stream) -> int:  # type: ignore[no-untyped-def]
        assert (kinds, first[0], attributes[0].order, attributes[0].flags) == (1, 0, 1, 0)
        self.batches.append(count)
        for number in range(count):
            if self.one(targets[number], sources[number], lengths[number], stream):
                failed[0] = number
                return 1
        return 0


class FakeDriver:
    """Registers nothing, remembers everything; fails at the n-th registration.

    Attributes:
        keeps: start of a chunk that cannot be unregistered, or -1.
    """

    def __init__(self, fail_at: int = -1, in_place: bool = True) -> None:
        self.fail_at = fail_at
        self.in_place = in_place
        self.keeps = -1
        self.held: dict[int, int] = {}

    def any_context(self) -> FakeDriver:
        return self

    def beside_captures(self) -> FakeDriver:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def register(self, address: int, length: int) -> int:
        if len(self.held) == self.fail_at:
            return 2
        self.held[address] = length
        return 0

    def unregister(self, address: int) -> int:
        if address == self.keeps:
            return 3
        del self.held[address]
        return 0

    def is_mapped_in_place(self, address: int) -> bool:
        return self.in_place

    def error_name(self, code: int) -> str:
        return f"CUDA_ERROR_{code}"
