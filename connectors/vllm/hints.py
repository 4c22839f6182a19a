"""Hints of a request about the further use of its blocks: `kv_transfer_params` of vLLM, under the name `tiercache`.

    {"prompt": ..., "kv_transfer_params": {"tiercache": {"return_in_s": 40}}}

The hint is sent when the request has ended and its new blocks have been stored.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import Priority

PARAMETER = "tiercache"
_PRIORITIES = {"": None, "low": Priority.LOW, "normal": Priority.NORMAL, "high": Priority.HIGH}


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `tiercache.Hint`."""

    done: bool = False
    return_in_s: float | None = None
    ttl_s: float | None = None
    priority: Literal["", "low", "normal", "high"] = ""


def hint_of(request: Any) -> Hint | None:
    """The hint of a request of vLLM, if it has one. Raises ValueError that says what is wrong with it."""
    parameters = request.kv_transfer_params
    said = parameters.get(PARAMETER) if isinstance(parameters, dict) else None
    if said is None:
        return None
    try:
        fields = msgspec.convert(said, _Fields)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return Hint(fields.done, fields.return_in_s, fields.ttl_s, _PRIORITIES[fields.priority])
