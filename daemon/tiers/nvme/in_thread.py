"""Calls that may block for ever, each on a thread of its own, so that a hung disk delays nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tiercache.errors import TierCacheError

T = TypeVar("T")


async def in_thread(name: str, call: Callable[[], T]) -> T:
    """The result of a call that may block for ever; the thread does not keep the process from ending."""
    outcome: Future[T] = Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(call())
        except (TierCacheError, OSError) as error:
            outcome.set_exception(error)
        finally:
            if not outcome.done():  # a bug of ours: the thread ends with its traceback
                outcome.set_exception(RuntimeError(f"{name} went wrong"))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)
