"""What an error of the server means to the tier.

An error is a line such as `-OOM command not allowed when used memory > 'maxmemory'.`: a code, and a text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

from .url import is_host

SLOTS = 16384
"""Slots of a cluster; each name belongs to one."""

SHOWN_BYTES = 160
"""How much of a server's text goes into ours: strangers may have written it."""

_PROBLEMS = {
    "OOM": StoreProblem.FULL,
    "LOADING": StoreProblem.BUSY,
    "BUSY": StoreProblem.BUSY,
    "TRYAGAIN": StoreProblem.BUSY,
    "CLUSTERDOWN": StoreProblem.BUSY,
    "MASTERDOWN": StoreProblem.BUSY,
    "NOREPLICAS": StoreProblem.BUSY,
    "READONLY": StoreProblem.READ_ONLY,
    "MISCONF": StoreProblem.READ_ONLY,
    "NOAUTH": StoreProblem.DENIED,
    "WRONGPASS": StoreProblem.DENIED,
    "NOPERM": StoreProblem.DENIED,
    "DENIED": StoreProblem.DENIED,
    "MOVED": StoreProblem.PROTOCOL,
    "ASK": StoreProblem.PROTOCOL,
}
"""Errors that concern more than one value, by their code."""

_TEXTS = (
    ("max number of clients reached", StoreProblem.BUSY),
    ("unknown command", StoreProblem.PROTOCOL),
    ("Protocol error", StoreProblem.PROTOCOL),
)
"""Those that have only the code ERR, by the beginning of their text."""

_REMEDIES = {
    StoreProblem.FULL: "give it more maxmemory, or a maxmemory-policy that evicts (volatile-ttl)",
    StoreProblem.READ_ONLY: "name its primary, or repair what keeps it from writing",
    StoreProblem.DENIED: "check user and password in the store's URL, and what that user may do",
}


class Refusal(NamedTuple):
    """An error that the server answered with."""

    code: str
    text: str

    @property
    def problem(self) -> StoreProblem | None:
        """What it says about the store; None if it is about the one value alone."""
        if self.code == "ERR":
            return next((problem for start, problem in _TEXTS if self.text.startswith(start)), None)
        return _PROBLEMS.get(self.code)

    def error(self, where: str, problem: StoreProblem) -> StoreError:
        """As an error of the whole call."""
        remedy = _REMEDIES.get(problem, "")
        if self.code in ("MOVED", "ASK"):
            return StoreError(
                problem, f"{where}: it is a node of a cluster: write valkey+cluster:// in the store's URL"
            )
        return StoreError(problem, f"{where}: {self}" + (f": {remedy}" if remedy else ""))

    def __str__(self) -> str:
        return f"{self.code} {self.text}".rstrip(" .")


def read_refusal(line: bytes) -> Refusal:
    """What an error line says; characters that could upset a log or a terminal are left out."""
    text = re.sub(r"[^ -~]+", "?", line[1 : 1 + SHOWN_BYTES].decode("ascii", "replace"))
    code, _, rest = text.partition(" ")
    return Refusal(code, rest)


class Redirect(NamedTuple):
    """Where else a cluster has a name: `-MOVED 866 10.0.0.3:6379`, or for the time of a move `-ASK …`."""

    slot: int
    host: str
    """Empty: the host that was asked."""
    port: int
    asking: bool


def read_redirect(refusal: Refusal) -> Redirect | None:
    """The redirect that a refusal is, if it is one."""
    if refusal.code not in ("MOVED", "ASK"):
        return None
    found = re.fullmatch(r"([0-9]{1,5}) ([A-Za-z0-9._:-]{0,253}):([0-9]{1,5})", refusal.text.strip())
    if (
        not found
        or int(found[1]) >= SLOTS
        or not 1 <= int(found[3]) <= 65535
        or not (not found[2] or is_host(found[2]))
    ):
        return None
    return Redirect(int(found[1]), found[2], int(found[3]), refusal.code == "ASK")
