"""One direction of copies on a GPU: its stream, its staging memory, and the copies submitted to it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tiercache.copies.cuda_driver import beside_captures
from tiercache.errors import ArenaError
from tiercache.ground import forks

if TYPE_CHECKING:
    import torch


class CudaCopy:
    """One submitted copy. Its memory belongs to it until `done()` is true.

    Attributes:
        error: "" or why the bytes at the target are not all right. A copy can fail with parts still in progress: it is
            `done()` when the last of them is over. If the device itself broke, completion cannot be known any more:
            `error` is set and `done()` stays false; treat both ends as in use for as long as the process lives.
    """

    def __init__(self, event: torch.cuda.Event | None, error: str = "", lost: bool = False) -> None:
        self.event = event
        self.error = error
        self._lost = lost

    def done(self) -> bool:
        """True if nothing of this copy is in progress any more. Never blocks."""
        if self._lost:
            return False
        event = self.event  # another thread may find it done meanwhile
        if event is not None:
            try:
                with beside_captures():
                    if not event.query():  # type: ignore[no-untyped-call, unused-ignore]
                        return False
            except RuntimeError as problem:  # how torch reports that the context is broken
                self._lost = True
                self.error = f"the GPU failed during a copy: {problem}"
                return False
            self.event = None
        return True

    def wait(self, timeout_s: float) -> bool:
        """Poll until every byte has arrived; returns True.

        Raises ArenaError if the copy failed, or was not done after `timeout_s`. `done()` then says
        whether its memory is free again.
        """
        deadline = time.monotonic() + timeout_s
        pause = 20e-6
        while not self.done() and not self._lost:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ArenaError(f"a GPU copy was not done after {timeout_s} s: its memory is still in use")
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1e-3)
        if self.error:
            raise ArenaError(self.error)
        return True


class Lane:
    """A direction: its stream, its staging rows, and the last copy submitted.

    Users of the stream hold `lock`, so that `last` is behind everything on it.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        self.lock = threading.Lock()
        forks.watch(self, "lock")
        self.staging: torch.Tensor | None = None
        self.last = CudaCopy(None)

    def allocate(self, rows: int, block_bytes: int) -> None:
        """Allocate staging that only this stream ever touches, so stream order alone protects it."""
        import torch

        with torch.cuda.stream(self.stream):
            self.staging = torch.empty((rows, block_bytes), dtype=torch.uint8, device=self.stream.device)

    def mark(self, error: str) -> CudaCopy:
        """A copy that is done when everything given to the stream so far is done."""
        import torch

        try:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record(self.stream)
            self.last = CudaCopy(event, error)
        except RuntimeError as problem:
            self.last = CudaCopy(None, error or f"the GPU failed during a copy: {problem}", lost=True)
        return self.last
