"""The device under test. In a rehearsal it is the CPU: a stand-in for the driver copies with memmove, all is small."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REHEARSAL_VARIABLE = "TIERCACHE_GPU_REHEARSAL"
REHEARSAL = bool(os.environ.get(REHEARSAL_VARIABLE))
DEVICE = "cpu" if REHEARSAL else "cuda:0"
ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 1 << 20, 1 << 30


def sized(real: int, rehearsed: int) -> int:
    """A size or count, small in a rehearsal."""
    return rehearsed if REHEARSAL else real


def synchronize() -> None:
    """Wait for everything that the device was given."""
    if not REHEARSAL:
        import torch

        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    """Wall time of `run` until the device is done with it."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def helper_folders(*names: str) -> None:
    """Make helpers of the tests importable."""
    sys.path[:0] = [str(ROOT / "tests" / name) for name in names]


def stand_ins() -> None:
    """In a rehearsal: a driver whose copies are memmove, and streams on which everything is done at once."""
    if not REHEARSAL:
        return
    import torch

    helper_folders("kernels")
    from fake_driver import STREAM, FakeLibrary

    from tiercache.copies import cuda, cuda_driver, host_memory

    class Driver(cuda_driver.Driver):
        def context(self, device: int) -> Any:
            return contextlib.nullcontext()

    class Stream:
        cuda_stream = STREAM
        device = torch.device("cpu")

        def __init__(self, *_: object, **__: object) -> None: ...

        def wait_event(self, event: object) -> None: ...

        def wait_stream(self, stream: object) -> None: ...

    class Event:
        def __init__(self, *_: object, **__: object) -> None: ...

        def record(self, stream: object = None) -> None: ...

        def query(self) -> bool:
            return True

    library = FakeLibrary()
    driver = Driver(library)
    host_memory.driver = lambda: library.registrar  # type: ignore[assignment]
    cuda.require_cuda = lambda: driver  # type: ignore[assignment]
    here: Any = torch.cuda
    here.Stream, here.Event, here.current_stream = Stream, Event, Stream
    here.device = here.stream = contextlib.nullcontext
    here.synchronize = lambda *_: None
    here.is_current_stream_capturing = lambda: False
