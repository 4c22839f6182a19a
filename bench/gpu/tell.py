"""How a part says what it found: a line of JSON on its stdout for each result, as soon as it is known.

Anything else that a part prints goes to the log. A part goes on after a check that failed: one call on the machine
should answer as much as it can.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARK = "@result "
LIMIT_VARIABLE = "TIERCACHE_GPU_CHECK_UNTIL"
REASON_LINES = 12
"""Last lines of a failure that are kept."""


class Skip(Exception):
    """What was to be checked does not apply here, for the reason given."""


def _tell(**result: Any) -> None:
    print(MARK + json.dumps(result), flush=True)


def check(name: str, passed: bool, detail: str = "") -> None:
    """A question that was answered with yes or no. A no fails the whole run."""
    _tell(kind="check", name=name, passed=bool(passed), detail=detail)


def figure(
    name: str, value: float, unit: str = "", *, at_least: float | None = None, at_most: float | None = None
) -> None:
    """A measurement. One that misses its target is shown as missed, and fails nothing."""
    if os.environ.get("TIERCACHE_GPU_REHEARSAL"):
        at_least = at_most = None  # a rehearsal's speeds say nothing
    met = None
    if at_least is not None:
        met = value >= at_least
    if at_most is not None:
        met = value <= at_most
    _tell(
        kind="figure",
        name=name,
        value=float(f"{value:.4g}"),
        unit=unit,
        at_least=at_least,
        at_most=at_most,
        met=met,
    )


def fact(name: str, value: Any) -> None:
    """Something about this machine, or about how a figure came about."""
    _tell(kind="fact", name=name, value=value)


def skip(name: str, why: str) -> None:
    """What was not looked at, and why."""
    _tell(kind="skip", name=name, why=" ".join(str(why).split())[:400])


@contextmanager
def checking(name: str) -> Iterator[None]:
    """The block is the check: it fails with any exception, and the part goes on."""
    try:
        yield
    except Skip as reason:
        skip(name, str(reason))
    except Exception:  # noqa: BLE001 - it is told, and the part goes on
        check(name, False, "\n".join(traceback.format_exc().strip().splitlines()[-REASON_LINES:]))
    else:
        check(name, True)


def left_s() -> float:
    """Seconds until this part is killed."""
    until = os.environ.get(LIMIT_VARIABLE)
    return float(until) - time.time() if until else 3600.0


def need(seconds: float) -> None:
    """Raises Skip if less time than that is left."""
    if left_s() < seconds:
        raise Skip(f"{seconds:.0f} s are needed and {max(left_s(), 0):.0f} s left")
