"""Requests of clients, and their validation.

A field that would change the answer is served or refused by name; it is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tiercache.engine.prompts import Message, Prompts
from tiercache.engine.sampling import MAX_LOGPROBS, SamplingParams
from tiercache.errors import ConfigError
from tiercache.serve.failures import ApiError

MAX_CHOICES = 128
MAX_LOGPROB_VALUES = 1 << 22
"""Log-probabilities in one answer: they take about 100 bytes each, and an answer is in memory until it is sent."""
DEFAULT_COMPLETION_TOKENS = 16
_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}
"""Fields that do not affect the answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (True, False),
}
"""Fields served with these values only, which ask for nothing."""
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


Encoder = Callable[[], list[int]]
"""Gives the token ids of a prompt; may take long. Raises ConfigError."""


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class GenerationRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields of both interfaces; None is the model's default. See `SamplingParams`."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] = []
    priority: int = 0
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(self, defaults: Mapping[str, Any], max_tokens: int, logprobs: int | None) -> SamplingParams:
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0  # both mean all
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens, "logprobs": logprobs, "stop": stop})


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    def encoders(self, prompts: Prompts) -> list[Encoder]:
        """For each prompt a function that gives its token ids. Raises ApiError."""
        given = self.prompt
        if isinstance(given, list) and given and all(isinstance(item, int) for item in given):
            tokens = [item for item in given if isinstance(item, int)]
            return [lambda: tokens]
        each = [given] if isinstance(given, str) else given
        if not each:
            raise ApiError(400, "prompt is an empty list: give at least one prompt", param="prompt")
        if len(each) > MAX_CHOICES:
            raise ApiError(400, f"{len(each)} prompts: a request may have {MAX_CHOICES} choices", param="prompt")
        found: list[Encoder] = []
        for item in each:
            if isinstance(item, int):
                raise ApiError(400, "prompt mixes texts and token ids: give lists of one kind", param="prompt")
            found.append(partial(prompts.of_text, item) if isinstance(item, str) else partial(list, item))
        return found

    def params(self, defaults: Mapping[str, Any], room: int) -> SamplingParams:
        """The sampling parameters. Raises ConfigError."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._params(defaults, max_tokens, self.logprobs)


class ChatRequest(GenerationRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def encoders(self, prompts: Prompts) -> list[Encoder]:
        """A function that gives the token ids of the conversation, the only prompt. Raises ApiError."""
        if not self.messages:
            raise ApiError(400, "messages is empty: give at least one", param="messages")
        messages = [_message(number, message) for number, message in enumerate(self.messages)]
        return [partial(prompts.of_chat, messages, self.chat_template_kwargs)]

    def params(self, defaults: Mapping[str, Any], room: int) -> SamplingParams:
        """The sampling parameters, with up to `room` tokens unless the client says. Raises ApiError, ConfigError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set that to true", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            text = f"top_logprobs is {self.top_logprobs}: must be 0 to {MAX_LOGPROBS}"
            raise ApiError(400, text, param="top_logprobs")
        wanted = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        # If there is no room at all, the check of the prompt reports it.
        max_tokens = max(1, room) if wanted is None else wanted
        return self._params(defaults, max_tokens, (self.top_logprobs or 0) if self.logprobs else None)


_R = TypeVar("_R", bound=GenerationRequest)


def parse(body: bytes | bytearray, kind: type[_R]) -> _R:
    """A request from its JSON. Raises ApiError that names the field."""
    try:
        tree = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ApiError(400, "the body is JSON, and no object: send one in braces")
    # Clients send null for "not given".
    tree = {name: value for name, value in tree.items() if value is not None and name not in _IGNORED}
    for name, allowed in _NEUTRAL.items():
        if name in tree and tree.pop(name) not in allowed:
            values = " or ".join(json.dumps(value) for value in allowed)
            raise ApiError(400, f"{name} is not served (except {values}): leave it out", param=name, code="unsupported")
    if unknown := sorted(tree.keys() - set(kind.__struct_fields__)):
        raise ApiError(400, f"{unknown[0]} is not a field that is served: leave it out", param=unknown[0])
    try:
        request = msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        param = place.rstrip("`").split("[")[0].split(".")[0] or None
        raise ApiError(400, f"{param}: {text}" if param else text, param=param) from None
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: set that to true", param="stream_options")
    return request


def check_size(prompts: int, params: SamplingParams) -> None:
    """Raises ApiError for a request whose answer would be too large."""
    choices = prompts * params.n
    if choices > MAX_CHOICES:
        text = f"{prompts} prompts with n {params.n}: a request may have {MAX_CHOICES} choices"
        raise ApiError(400, text, param="n")
    values = 0 if params.logprobs is None else choices * params.max_tokens * (1 + params.logprobs)
    if values > MAX_LOGPROB_VALUES:
        text = f"{values} log-probabilities, and an answer may have {MAX_LOGPROB_VALUES}: lower max_tokens or n"
        raise ApiError(400, text, param="logprobs")


def _message(number: int, message: dict[str, Any]) -> Message:
    """A message with its content as one text, as templates of text models take it."""
    place = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{place} has no role: give one", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(place, part) for part in content)
    if not isinstance(content, (str, type(None))):
        raise ApiError(400, f"{place}.content must be a text or a list of text parts", param="messages")
    return {**message, "content": content or ""}


def _part(place: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ApiError(400, f"{place}.content has a part of type {kind}: only text is served", param="messages")
    return str(part["text"])


def sampling_defaults(model_dir: str | Path) -> dict[str, Any]:
    """Values for fields that a request leaves out: what the model's authors recommend, else OpenAI's defaults.

    Raises ConfigError for an invalid generation_config.json.
    """
    defaults: dict[str, Any] = {"temperature": 1.0}
    path = Path(model_dir) / "generation_config.json"
    if path.is_file():
        try:
            recommended = json.loads(path.read_text())
            given = {name: recommended[name] for name in _MODEL_DEFAULTS if recommended.get(name) is not None}
            SamplingParams(**given)
        except (ValueError, TypeError, AttributeError, OSError, ConfigError) as error:
            raise ConfigError(f"{path} cannot be used: {error}") from error
        defaults |= given
    return defaults
