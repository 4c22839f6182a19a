"""All kinds of requests and replies, for decoders, and which reply answers which request."""

from __future__ import annotations

import functools
from typing import Any, Union, get_args

from . import admin as admin  # its requests and replies are kinds too
from .replies import Reply
from .requests import ReplyT, Request

AnyRequest = Request[Any]
ANY_REQUEST: Any = Union[tuple(Request.__subclasses__())]  # noqa: UP007 (made from a list)
ANY_REPLY: Any = Union[tuple(Reply.__subclasses__())]  # noqa: UP007


@functools.cache
def reply_type(request_type: type[Request[ReplyT]]) -> type[ReplyT]:
    """What a request is answered with, when that is not an `Error`."""
    found: type[ReplyT] = get_args(request_type.__orig_bases__[0])[0]  # type: ignore[attr-defined]
    return found
