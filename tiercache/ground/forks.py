"""Forked children: this package's objects belong to the parent, and say so at once.

A child has none of its parent's threads, so a lock that one of them held stays locked, a queue is never emptied, and a
socket or a session is still the parent's. Each class that owns such things calls `watch` in its constructor; this is
the only place that hooks into `fork`. In the child its locks are new, and its `forget_in_child` drops the rest without
a message to the daemon.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

FORKED = "this process was forked from the one that connected; connect again here"

logger = logging.getLogger("tiercache.client")
_watched: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
_calls: list[Callable[[], None]] = []


def watch(item: Any, *locks: str) -> None:
    """In each child forked from now on, give `item` new `locks` (names of attributes) and have it forget.

    A condition has the lock that is named before it. Forgetting calls the method `forget_in_child`, if there is one.
    `item` is not kept alive by this.
    """
    _watched[item] = locks


def in_child(call: Callable[[], None]) -> Callable[[], None]:
    """Call a module's function in each forked child, e.g. to renew a lock of that module."""
    _calls.append(call)
    return call


def _renew(item: Any, locks: tuple[str, ...]) -> None:
    new: Any = None
    for name in locks:
        old = getattr(item, name)
        if isinstance(old, threading.Condition):
            new = threading.Condition(new)
        elif isinstance(old, threading.Event):
            new = threading.Event()
        else:
            new = threading.Lock() if isinstance(old, type(threading.Lock())) else threading.RLock()
        setattr(item, name, new)


def _forget_all() -> None:
    # The locks of all first: one item may call another.
    items = list(_watched.items())
    for item, locks in items:
        _renew(item, locks)
    for call in [*_calls, *(item.forget_in_child for item, _ in items if hasattr(item, "forget_in_child"))]:
        try:
            call()
        except Exception:
            # The child goes on, and the others must forget too.
            logger.exception("something of the parent process could not be forgotten after a fork")


os.register_at_fork(after_in_child=_forget_all)
