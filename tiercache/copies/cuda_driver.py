"""The CUDA driver, through ctypes: host memory registration and copies.

Not through torch, for two reasons:

- registering memory through the runtime (`torch.cuda.cudart()`) leaves a failure behind as the
  thread's "last error", and an innocent kernel launch later raises it; the driver has no such memory;
- the batched copy takes address arrays as they are, without a Python object per descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from tiercache.copies.copy_plan import CopyRuns
from tiercache.errors import ArenaError

log = logging.getLogger("tiercache.cuda")

MAX_BATCH = 4096
"""Descriptors in one call to the driver."""

_REGISTER_PORTABLE_AND_MAPPED = 3
_SOURCE_IN_STREAM_ORDER = 1
_CAPTURE_MODE_RELAXED = 2


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, two location hints of (type, id), flags."""

    _fields_ = [
        ("source_access_order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class Driver:
    """The few driver calls needed here. They release the GIL; 0 means success.

    Raises OSError where there is no driver library and AttributeError where it is too old.
    """

    def __init__(self, library: Any = None) -> None:
        library = library or ctypes.CDLL("libcuda.so.1")
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._init = self._function(library.cuInit, ctypes.c_uint)
        self._error_name = self._function(library.cuGetErrorName, ctypes.c_int, pointer)
        self._retain = self._function(library.cuDevicePrimaryCtxRetain, pointer, ctypes.c_int)
        state = library.cuDevicePrimaryCtxGetState
        self._context_state = self._function(state, ctypes.c_int, pointer, pointer)
        self._device_count = self._function(library.cuDeviceGetCount, pointer)
        self._push = self._function(library.cuCtxPushCurrent_v2, pointer)
        self._pop = self._function(library.cuCtxPopCurrent_v2, pointer)
        self._register = self._function(library.cuMemHostRegister_v2, pointer, size, ctypes.c_uint)
        self._unregister = self._function(library.cuMemHostUnregister, pointer)
        self._mapped = self._function(library.cuMemHostGetDevicePointer_v2, pointer, pointer, ctypes.c_uint)
        self._copy = self._function(library.cuMemcpyAsync, address, address, size, pointer)
        self._capture_mode = self._function(library.cuThreadExchangeStreamCaptureMode, pointer)
        # Since CUDA 12.8. The plain name keeps the first signature, with a place for the failed index.
        batch = getattr(library, "cuMemcpyBatchAsync", None)
        self._batch = (
            None
            if batch is None
            else self._function(batch, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        )
        self._contexts: dict[int, ctypes.c_void_p] = {}

    @staticmethod
    def _function(function: Any, *arguments: Any) -> Any:
        function.restype, function.argtypes = ctypes.c_int, arguments
        return function

    @property
    def batches(self) -> bool:
        """True if many copies can go in one call."""
        return self._batch is not None

    def error_name(self, code: int) -> str:
        """`CUDA_ERROR_INVALID_VALUE` and the like."""
        text = ctypes.c_char_p()
        self._error_name(code, ctypes.byref(text))
        return (text.value or str(code).encode()).decode()

    @contextlib.contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The device's primary context (torch's) is current on this thread. Raises ArenaError."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            code = self._init(0) or self._retain(ctypes.byref(context), device)
            if code:
                raise ArenaError(f"CUDA device {device} cannot be used: {self.error_name(code)}")
            self._contexts[device] = context
        code = self._push(self._contexts[device])
        if code:
            raise ArenaError(f"CUDA device {device} cannot be used: {self.error_name(code)}")
        try:
            yield
        finally:
            self._pop(ctypes.byref(ctypes.c_void_p()))

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Calls of this thread do not spoil a CUDA graph that another thread is capturing.

        By default even a query of an event is forbidden to all threads during a capture, fails, and makes the capture
        fail.
        """
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        changed = self._capture_mode(ctypes.byref(mode)) == 0
        try:
            yield
        finally:
            if changed:
                self._capture_mode(ctypes.byref(mode))  # the call before has put the former mode there

    def any_context(self) -> contextlib.AbstractContextManager[None]:
        """The context of a device that this process uses already: a new one costs device memory."""
        count, flags, active = ctypes.c_int(0), ctypes.c_uint(0), ctypes.c_int(0)
        self._init(0)
        self._device_count(ctypes.byref(count))
        for device in range(count.value):
            self._context_state(device, ctypes.byref(flags), ctypes.byref(active))
            if active.value:
                return self.context(device)
        return self.context(0)

    def register(self, address: int, length: int) -> int:
        """Page-lock host memory and map it for all devices. Blocks (about 0.1 s per GiB)."""
        return int(self._register(address, length, _REGISTER_PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> int:
        """Undo one `register`. No copy may be using the memory."""
        return int(self._unregister(address))

    def is_mapped_in_place(self, address: int) -> bool:
        """True if kernels see registered host memory at its host address."""
        seen = ctypes.c_void_p()
        return self._mapped(ctypes.byref(seen), address, 0) == 0 and seen.value == address

    def copy(self, runs: CopyRuns, stream: int, *, batched: bool) -> str:
        """Enqueue copies on a stream that is not the default one; "" or what went wrong.

        After a failure some of the copies may be in progress: record an event all the same.
        """
        if batched and self._batch is not None and len(runs) > 1:
            return self._copy_batches(runs, stream)
        for source, target, length in runs:
            code = self._copy(target, source, length, stream)
            if code:
                return f"{self.error_name(code)} in a copy of {length} bytes"
        return ""

    def _copy_batches(self, runs: CopyRuns, stream: int) -> str:
        assert self._batch is not None
        attributes = _CopyAttributes(source_access_order=_SOURCE_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        for start in range(0, len(runs), MAX_BATCH):
            part = [np.ascontiguousarray(column[start : start + MAX_BATCH]) for column in runs.columns()]
            source, target, length = (column.ctypes.data for column in part)
            code = self._batch(
                target,
                source,
                length,
                len(part[0]),
                ctypes.byref(attributes),
                ctypes.byref(first),
                1,
                ctypes.byref(failed),
                stream,
            )
            if code:
                return f"{self.error_name(code)} in a batch of {len(part[0])} copies (copy {failed.value})"
        return ""


@functools.cache
def driver() -> Driver | None:
    """The driver of this machine, or None."""
    try:
        return Driver()
    except (OSError, AttributeError) as problem:
        log.debug("no CUDA driver: %s", problem)
        return None


def beside_captures() -> contextlib.AbstractContextManager[None]:
    """See `Driver.beside_captures`; nothing where there is no driver."""
    found = driver()
    return contextlib.nullcontext() if found is None else found.beside_captures()
