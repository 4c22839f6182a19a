"""The lines of a shared tier and its event loop, driven step by step by a test: no threads, and a clock of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from tiercache.daemon.tiers.shared.lines import LineUse, SharedJob
from tiercache.daemon.tiers.shared.stores.store import SharedStore, StoreError

T = TypeVar("T")


class SteppedLines:
    """In the place of `Lines`: a job runs when `step` is called, in the caller's thread."""

    def __init__(self, store: SharedStore, uses: list[tuple[LineUse, ...]], call_soon_threadsafe: object) -> None:
        self._store = store
        self._queues: dict[LineUse, deque[SharedJob]] = {use: deque() for use in LineUse}
        self._posted: deque[Callable[[], None]] = deque()
        self.running: list[SharedJob] = []
        """More than one where a test runs the next one within a call of the store."""

    @property
    def waiting(self) -> int:
        return len(self._posted)

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues.values()))

    def submit(self, job: SharedJob, use: LineUse) -> None:
        job.post = self._posted.append
        self._queues[use].append(job)

    def step(self, which: int = 0, use: LineUse | None = None) -> bool:
        """Run the next job of a use, by number among those that have one, and tell the loop; False if there is none."""
        queues = [queue for its, queue in self._queues.items() if queue and use in (None, its)]
        if not queues:
            return False
        job, connection = queues[which % len(queues)].popleft(), self._store.connect()
        self.running.append(job)
        try:
            job.run(connection)
        except StoreError as error:
            job.problem = error
        self.running.pop()
        self._posted.append(job.ended)
        self.deliver()
        return True

    def deliver(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def stop(self, deadline_s: float) -> bool:
        for queue in self._queues.values():
            queue.clear()
        return True


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its time is `now_s`; what it would give to a thread is done at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__()
        self._errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self._errors.append(context))

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except OSError as error:
            future.set_exception(error)
        return future

    def act(self, call: Callable[[], T]) -> T:
        """Call it on the loop, and then what that leads to."""

        async def acting() -> T:
            result = call()
            for _ in range(4):
                await asyncio.sleep(0)
            return result

        result = self.run_until_complete(acting())
        assert not self._errors, self._errors
        return result
