"""tiercache as one of several connectors, below vLLM's MultiConnector.

Three things differ from running alone. Siblings write to blocks that stores may still read, so our hook before a step
runs before theirs, whatever their order. A sibling may take the handshake at the start, so ranks send the form of
their blocks with their reports, and the first requests wait for that. And the handling of failed loads is set at the
top, for all connectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tiercache.errors import ConfigError, ModelRefused

from .compat import base, locals_of_callers
from .orders import RankForm, WorkerReport

WAIT_S = 5.0
"""Longest wait of a request for the forms of ranks. They come with the next step, even one without tokens."""
TOO_EARLY = {"MoRIIOConnector"}
"""Connectors whose peers write to new blocks before the workers are told of these."""


def parent_of_caller(connector: Any) -> Any | None:
    """The connector that is making this one or calling it, if it is not vLLM itself."""
    parent = None
    for known in locals_of_callers():
        owner = known.get("self")
        if isinstance(owner, base.KVConnectorBase_V1) and owner is not connector:
            parent = owner
    return parent


def check_parent(parent: Any) -> None:
    """Raise ConfigError or ModelRefused for top-level settings under which we cannot be one of several."""
    config = parent._kv_transfer_config
    if config.kv_load_failure_policy != "recompute":
        text = "beside other connectors a load that fails would fail its request"
        where = f'set "kv_load_failure_policy": "recompute" next to "kv_connector": "{config.kv_connector}"'
        raise ConfigError(f"{text}: {where}")
    names = {child.get("kv_connector", "") for child in config.kv_connector_extra_config.get("connectors", [])}
    if early := sorted(names & TOO_EARLY):
        raise ModelRefused(f"peers of {early[0]} write to blocks before workers know it: leave one of the two out")


def come_first(parent: Any, connector: Any) -> Callable[[Any], None]:
    """Call a connector's hook before a step ahead of those of all its siblings. Returns a function that calls it.

    Some siblings begin to write to blocks there, and stores of these blocks must have ended by then. Raises
    ModelRefused where the parent is not a MultiConnector.
    """
    try:
        place = next(index for index, child in enumerate(parent.sub_connectors) if child is connector)
    except (AttributeError, StopIteration):
        raise ModelRefused(f"being one of the connectors of a {type(parent).__name__} is not served") from None
    original: Callable[[Any], None] = parent.handle_preemptions

    def ours(kv_connector_metadata: Any) -> None:
        connector.handle_preemptions(kv_connector_metadata.metadata[place])

    def handle_preemptions(kv_connector_metadata: Any) -> None:
        ours(kv_connector_metadata)
        original(kv_connector_metadata)

    parent.handle_preemptions = handle_preemptions
    return ours


class Roll:
    """The forms that ranks have reported, and the requests that wait for them. For the scheduler's thread.

    Args:
        ranks: how many there are.
        clock: in seconds.
    """

    def __init__(self, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._clock = ranks, clock
        self._forms: dict[int, RankForm] = {}
        self.waiting: dict[str, Any] = {}
        self._until_s: dict[str, float] = {}

    def call(self, report: WorkerReport) -> list[RankForm]:
        """Handle a report. Returns the forms of all ranks, in order, as soon as they are known."""
        self._forms.update(report.forms)
        return [self._forms[rank] for rank in sorted(self._forms)] if len(self._forms) == self._ranks else []

    def add(self, request: Any) -> None:
        """A request has arrived."""
        self.waiting[request.request_id] = request

    def waits(self, request_id: str) -> bool:
        """True if a request that vLLM asks about should wait; if not, it is computed without the cache."""
        if request_id not in self.waiting:
            return False
        now_s = self._clock()
        if now_s <= self._until_s.setdefault(request_id, now_s + WAIT_S):
            return True
        self.remove(request_id)
        return False

    def remove(self, request_id: str) -> None:
        """A request has ended, or continues without the cache."""
        self.waiting.pop(request_id, None)
        self._until_s.pop(request_id, None)
