"""Prompts from files: plain texts, and requests in OpenAI's form (one, a list, or one a line)."""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError

STDIN = "-"
MAX_FILE_BYTES = 64 << 20
MAX_PROMPTS = 1000
MAX_CHARS = 1 << 20
"""Of one prompt; what comes after them is not looked at."""
MAX_ALL_CHARS = 16 << 20
"""Of all prompts together."""
_REQUEST = ("messages", "prompt", "tools", "input")
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class PromptPart:
    """Characters `start ..< end` of a prompt. `stable`: an application means to send the same each time."""

    name: str
    start: int
    end: int
    stable: bool


@dataclass(frozen=True)
class LintedPrompt:
    """A prompt as an engine's template puts it together, without the template's own marks.

    `tools` are the definitions in the order of the request. `new_chars`: the last message, which is new in any case.
    """

    source: str
    text: str
    parts: tuple[PromptPart, ...]
    tools: tuple[Any, ...] = ()
    new_chars: int = 0

    def part_at(self, position: int) -> PromptPart:
        """The part with that character; the last one behind the end."""
        number = bisect_right(self.parts, position, key=lambda part: part.end)
        return self.parts[min(number, len(self.parts) - 1)]


def read_prompts(path: str, data: bytes) -> list[LintedPrompt]:
    """All prompts of a file. Raises ConfigError for one that cannot be understood."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    found = [_of_request(f"{path}{place}", request) for place, request in _requests(path, text)]
    if found:
        return [prompt for prompts in found for prompt in prompts]
    return [_of_text(path, text)]


def read_file(path: str) -> bytes:
    """The content of a file or of stdin. Raises ConfigError if there is none, or too much."""
    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB: give a part of it")
    return data


def _requests(path: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The requests of a file and their places in it; none in a file that is a text."""
    stripped = text.lstrip()
    if not stripped.startswith(("{", "[")):
        return
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        yield from _lines(path, text)
        return
    if request := _as_request(whole):
        yield "", request
    elif isinstance(whole, list) and whole and all(_as_request(one) for one in whole):
        yield from ((f":{number}", _as_request(one)) for number, one in enumerate(whole, 1))


def _lines(path: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    first = True
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = _as_request(json.loads(line))
        except (ValueError, RecursionError):
            request = {}
        if not request and first:
            return  # a text that happens to begin with a bracket
        if not request:
            known = ", ".join(_REQUEST)
            raise ConfigError(f"{path}:{number} is not a request in JSON: it needs one of {known}")
        first = False
        yield f":{number}", request


def _as_request(value: Any) -> dict[str, Any]:
    """The request in a value; empty if there is none. A list of messages is one, and so is a line of a batch file."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return {"messages": value}
    if not isinstance(value, dict):
        return {}
    if isinstance(value.get("body"), dict):
        value = value["body"]
    return value if any(value.get(name) for name in _REQUEST) else {}


def _of_text(source: str, text: str) -> LintedPrompt:
    return LintedPrompt(source, text[:MAX_CHARS], (PromptPart("", 0, len(text), stable=False),))


def _of_request(source: str, request: dict[str, Any]) -> list[LintedPrompt]:
    messages = request.get("messages") or request.get("input")
    if not isinstance(messages, list):
        prompts = request.get("prompt") or messages or ""
        several = prompts if isinstance(prompts, list) and all(isinstance(one, str) for one in prompts) else [prompts]
        return [_of_text(source, one if isinstance(one, str) else json.dumps(one)) for one in several]
    return [_of_messages(source, messages, request.get("tools"))]


def _of_messages(source: str, messages: list[Any], tools: Any) -> LintedPrompt:
    """System messages, then tools, then the other messages, as most templates have it."""
    told = [(f"messages[{number}]", one) for number, one in enumerate(messages) if isinstance(one, dict)]
    system = [(name, one) for name, one in told if one.get("role") in _SYSTEM]
    others = [(name, one) for name, one in told if one.get("role") not in _SYSTEM]
    defined = tuple(tools) if isinstance(tools, list) else ()
    pieces = [(f"{name} (system)", _content(one), True) for name, one in system]
    pieces += [(f"tools[{number}]", json.dumps(one, ensure_ascii=False), True) for number, one in enumerate(defined)]
    pieces += [
        (f"{name} ({one.get('role', '')})", _content(one), not system and not number)
        for number, (name, one) in enumerate(others)
    ]
    text, parts = "", []
    for name, content, stable in pieces or [("messages", "", False)]:
        content = f"{content}\n"[: max(0, MAX_CHARS - len(text))]
        parts.append(PromptPart(name, len(text), len(text) + len(content), stable))
        text += content
    new_chars = parts[-1].end - parts[-1].start if len(others) > 1 or system else 0
    return LintedPrompt(source, text, tuple(parts), defined, new_chars)


def _content(message: dict[str, Any]) -> str:
    """What a message says: its text, and what else it has as JSON."""
    content = message.get("content")
    pieces = content if isinstance(content, list) else [content]
    texts = [one if isinstance(one, str) else _piece(one) for one in pieces if one is not None]
    calls = message.get("tool_calls")
    return "\n".join([*texts, *([json.dumps(calls, ensure_ascii=False)] if calls else [])])


def _piece(piece: Any) -> str:
    if isinstance(piece, dict) and isinstance(piece.get("text"), str):
        return str(piece["text"])
    return json.dumps(piece, ensure_ascii=False)
