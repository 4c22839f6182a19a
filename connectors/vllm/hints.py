"""What a request says in vLLM's `kv_transfer_params`, under the name `tiercache`.

    {"prompt": ..., "kv_transfer_params": {"tiercache": {"return_in_s": 40}}}

A hint about the further use of its blocks is sent when the request has ended and its new blocks have been stored.

    {"prompt": ..., "kv_transfer_params": {"tiercache": {"stored": 2048}}}

So many leading tokens another engine is storing, or has stored: the request waits for them, for a short time. The
number comes from the answer to a request for prefill only (`stored_answer`).
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
    stored: int = 0


def hint_of(request: Any) -> Hint | None:
    """The hint of a request of vLLM, if it has one. Raises ValueError that says what is wrong with it."""
    said = _said(request)
    if said is None:
        return None
    try:
        fields = msgspec.convert(said, _Fields)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if msgspec.structs.replace(fields, stored=0) == _Fields():
        return None
    return Hint(fields.done, fields.return_in_s, fields.ttl_s, _PRIORITIES[fields.priority])


def awaited_tokens(request: Any) -> int:
    """How many leading tokens of a request another engine is storing, as the request says; 0 if it does not."""
    said = _said(request)
    stored = said.get("stored", 0) if isinstance(said, dict) else 0
    return max(0, stored) if type(stored) is int else 0


def stored_answer(request: Any, tokens: int) -> dict[str, Any] | None:
    """What the answer to a request says of its stored tokens, for the engine that goes on with it.

    None if the request asks for nothing of the kind: it has neither our name nor vLLM's `do_remote_decode`.
    """
    parameters = request.kv_transfer_params
    if not isinstance(parameters, dict) or not (PARAMETER in parameters or parameters.get("do_remote_decode")):
        return None
    return {PARAMETER: {"stored": tokens}}


def _said(request: Any) -> Any:
    parameters = request.kv_transfer_params
    return parameters.get(PARAMETER) if isinstance(parameters, dict) else None
