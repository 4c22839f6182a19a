"""Pauses of 20 to 400 ms in random threads of every Python process that has this folder in its PYTHONPATH.

A busy machine stops any thread at any line; a race that needs such a stop shows itself sooner. A signal that counts CPU
time stops the main thread; a random number of calls stops another one. `make test-again` uses it. PAUSES is the seed;
without it nothing happens.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

LEAST_S, MOST_S = 0.02, 0.4
MAIN_EVERY_S = 0.2, 2.0
"""CPU seconds of the process between two pauses of its main thread."""
CALLS = 200, 60_000
"""Calls of functions between two pauses of another thread."""


def install(seed: str) -> None:
    """Begin to pause this process."""
    rng = random.Random(f"{seed}/{os.getpid()}")

    def pause() -> None:
        time.sleep(rng.uniform(LEAST_S, MOST_S))  # rule: the pause is what this file is for

    def stop_main(number: int, frame: FrameType | None) -> None:
        pause()
        signal.setitimer(signal.ITIMER_PROF, rng.uniform(*MAIN_EVERY_S))

    left = threading.local()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            left.calls = getattr(left, "calls", rng.randint(*CALLS)) - 1
            if left.calls <= 0:
                left.calls = rng.randint(*CALLS)
                pause()

    threading.setprofile(called)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGPROF, stop_main)
        signal.setitimer(signal.ITIMER_PROF, rng.uniform(*MAIN_EVERY_S))
        # At its very end the interpreter takes its handlers away, and the signal would kill the process.
        atexit.register(signal.signal, signal.SIGPROF, signal.SIG_IGN)


if (seed := os.environ.get("PAUSES")) and "pip" not in sys.argv[:1]:
    install(seed)
