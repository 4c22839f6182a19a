"""Requests of one object store: made side by side by a thread with an event loop, and awaited with deadlines.

Cancelling a request closes its connection to the server, so what is late costs neither a thread nor a descriptor. The
bytes of a value come back to the thread that asked: a late answer never reaches memory that its caller has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from itertools import islice
from typing import Any

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

HUNG_S = 10.0
"""An event loop that has not turned for this time is given up: obstore hangs in it."""
MAX_LOOPS = 4
"""The most loops that were given up, and keep their threads: beyond it no other is started."""

Job = Callable[[], Coroutine[Any, Any, Any]]
log = logging.getLogger("tiercache.daemon")


class RequestThread:
    """One event loop in a thread. It ends with the process: what hangs in it hangs alone."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.asked_s = 0.0
        """Since when it was asked to do something that it has not begun; 0 if it has begun all."""
        self._thread = threading.Thread(target=self._run, name="object store", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.loop.close()
            raise

    def call(self, work: Callable[..., object], *arguments: object) -> None:
        """Have the loop do something. Raises RuntimeError after `stop`."""
        self.asked_s = self.asked_s or time.monotonic()
        self.loop.call_soon_threadsafe(self._begin, work, arguments)

    def stop(self) -> None:
        """Cancel everything and end the loop, without waiting for it."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._end()))

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.loop.stop()

    def _begin(self, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.asked_s = 0.0
        work(*arguments)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()


class BucketRequests:
    """All requests to one store. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: RequestThread | None = None
        self._given_up = 0
        self._closed = False

    def side_by_side(self, jobs: Iterable[Job], width: int, deadline_s: float) -> Iterator[tuple[int, Any]]:
        """Do the jobs, at most `width` at once; yields number and result, or exception, of each as they end.

        `jobs` is consumed in the calling thread, as there is room. Raises StoreError at the deadline, after which no
        job begins. At the end of the iteration, however it ends, nothing is under way.
        """
        thread = self._current()
        ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        tasks: set[asyncio.Task[Any]] = set()

        def start(number: int, job: Job) -> None:
            task = thread.loop.create_task(job())
            tasks.add(task)
            task.add_done_callback(lambda task: end(number, task))

        def end(number: int, task: asyncio.Task[Any]) -> None:
            tasks.discard(task)
            if task.cancelled():
                ended.put((number, StoreError(StoreProblem.UNREACHABLE, "the store was closed during the call")))
            else:
                ended.put((number, task.exception() or task.result()))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        waiting = enumerate(jobs)
        under_way = 0
        try:
            while True:
                for number, job in islice(waiting, width - under_way):
                    if time.monotonic() >= deadline_s:
                        raise self._late(thread)
                    thread.call(start, number, job)
                    under_way += 1
                if not under_way:
                    return
                try:
                    answer = ended.get(timeout=max(0.0, deadline_s - time.monotonic()))
                except queue.Empty:
                    raise self._late(thread) from None
                under_way -= 1
                yield answer
        except RuntimeError:
            raise StoreError(StoreProblem.UNREACHABLE, "the store is closed") from None
        finally:
            if under_way:
                with contextlib.suppress(RuntimeError):  # closed, which has cancelled all
                    thread.call(cancel)

    def close(self) -> None:
        """End the thread and all requests, without waiting."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def _current(self) -> RequestThread:
        with self._lock:
            if self._closed:
                raise StoreError(StoreProblem.UNREACHABLE, "the store is closed")
            if self._thread is None:
                if self._given_up >= MAX_LOOPS:
                    raise StoreError(StoreProblem.UNREACHABLE, "obstore hangs: start the daemon again")
                try:
                    self._thread = RequestThread()
                except RuntimeError as error:
                    text = f"no thread for the requests of an object store: {error}"
                    raise StoreError(StoreProblem.BUSY, text) from None
            return self._thread

    def _late(self, thread: RequestThread) -> StoreError:
        with self._lock:
            if thread is self._thread and thread.asked_s and time.monotonic() - thread.asked_s > HUNG_S:
                self._thread = None
                self._given_up += 1
                thread.stop()  # if it ever goes on
                log.warning("the requests of an object store hang: another thread makes them from now on")
        return StoreError(StoreProblem.TIMEOUT, "the object store did not answer in time")
