"""A model for use in a program: texts or conversations in, texts out.

with LLM("path/to/model") as llm:
    [answer] = llm.chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(answer.outputs[0].text)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tiercache.engine.connect import connect_to
from tiercache.engine.engine import Engine
from tiercache.engine.prompts import Message, Prompts, load_tokenizer
from tiercache.engine.sampling import SamplingParams, TokenLogprobs
from tiercache.engine.sequence import RequestOutput, StepOutput
from tiercache.engine.settings import EngineSettings
from tiercache.errors import ConfigError, DeadlineExceeded

# Decoders write this for bytes that are not a character, or not yet.
_NOT_YET = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes and a token at least one, so after as many tokens it will never be a character.
_MAX_PENDING = 8
# Tokens of the prompt that decide how the first new token is written.
_CONTEXT = 6


class Detokenizer:
    """Text of one sequence, token by token. `tokenizer` is one of transformers'.

    A token costs two decodings of a few tokens. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-_CONTEXT:])
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that `token` completes, often none."""
        self._pending.append(token)
        text, before = self._decode(self._context + self._pending), self._decode(self._context)
        incomplete = text.endswith(_NOT_YET) or len(text) <= len(before)
        if incomplete and len(self._pending) < _MAX_PENDING:
            return ""
        if len(text) > len(before):  # else they have no text (special tokens) and serve as no context
            self._context = self._pending
        self._pending = []
        return text[len(before) :]

    def flush(self) -> str:
        """The rest, after the last token."""
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class Cut(NamedTuple):
    """Text that may be shown now, and whether a stop string came behind it."""

    text: str
    stopped: bool


class StopStrings:
    """Passes text up to the first stop string; holds back text that may become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = stops
        self._kept = ""

    def add(self, text: str) -> Cut:
        """Add new text. Do not call it after `stopped`."""
        self._kept += text
        starts = [start for stop in self._stops if (start := self._kept.find(stop)) >= 0]
        if starts:
            return Cut(self._kept[: min(starts)], stopped=True)
        keep = max((_overlap(self._kept, stop) for stop in self._stops), default=0)
        shown = len(self._kept) - keep
        shown_text, self._kept = self._kept[:shown], self._kept[shown:]
        return Cut(shown_text, stopped=False)

    def flush(self) -> str:
        """The text held back, after the last text."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class TextOutput:
    """A new token of sequence `index` of a request, and the text that it completes (often none).

    `result` is set with the last token; its `finish_reason` is `stop` for a stop string too.
    """

    request_id: int
    index: int
    token: int
    text: str
    logprobs: TokenLogprobs | None
    result: RequestOutput | None


class _SequenceText:
    """The text of one sequence."""

    def __init__(self, tokenizer: Any, prompt: list[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(params.stop)
        self._unchecked = params.min_tokens

    def add(self, token: int, last: bool, hidden: bool) -> Cut:
        """Add a token; the `last` one releases the text held back, and a `hidden` one has no text."""
        text = "" if hidden else self._detokenizer.add(token)
        if self._unchecked > 0:
            self._unchecked -= 1
            return Cut(text + (self._detokenizer.flush() if last else ""), stopped=False)
        cut = self._stops.add(text + (self._detokenizer.flush() if last else ""))
        return cut if cut.stopped or not last else Cut(cut.text + self._stops.flush(), stopped=False)


class TextEngine:
    """An `Engine` and a tokenizer. Like the engine, for one thread."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._texts: dict[int, dict[int, _SequenceText]] = {}

    def add_request(self, prompt: Iterable[int], params: SamplingParams, priority: int = 0) -> int:
        """See `Engine.add_request`."""
        tokens = list(prompt)
        request_id = self.engine.add_request(tokens, params, priority)
        self._texts[request_id] = {index: _SequenceText(self._tokenizer, tokens, params) for index in range(params.n)}
        return request_id

    def step(self) -> list[TextOutput]:
        """Compute one step. A sequence that reaches a stop string ends with it."""
        return [self._text_output(step) for step in self.engine.step()]

    def _text_output(self, step: StepOutput) -> TextOutput:
        texts, result = self._texts[step.request_id], step.output
        # The token that ended it has no text, special or not.
        hidden = result is not None and result.finish_reason == "stop"
        cut = texts[step.index].add(step.token, last=result is not None, hidden=hidden)
        if cut.stopped:
            if result is None:
                [result] = self.engine.abort(step.request_id, step.index)
            result = replace(result, finish_reason="stop")
        if result is not None:
            del texts[step.index]
            if not texts:
                del self._texts[step.request_id]
        return TextOutput(step.request_id, step.index, step.token, cut.text, step.logprobs, result)

    def abort(self, request_id: int) -> None:
        """End a request now. Does nothing if it has already ended."""
        self.engine.abort(request_id)
        self._texts.pop(request_id, None)

    def is_unfinished(self, request_id: int) -> bool:
        """True if a request has tokens to come."""
        return request_id in self._texts


Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(slots=True)
class Completion:
    """One of the `n` answers to a prompt. `finish_reason` is `stop` or `length`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(slots=True)
class Generation:
    """The result of one prompt. `cached_tokens` of it were found in the pool or the cache and not computed."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0


class LLM:
    """A model and its tokenizer, for one thread.

    Args:
        model: a Hugging Face decoder folder.
        daemon: run directory of a tiercache daemon; None: blocks are kept in the engine's own pool only.
        chat_template: Jinja text that replaces the model's own.
        **settings: fields of `EngineSettings`, e.g. `kv_cache_memory="4GiB"`.

    Loading takes as long as reading the weights. Raises ModelRefused and ConfigError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        daemon: str | Path | None = None,
        chat_template: str | None = None,
        **settings: Any,
    ) -> None:
        try:
            engine_settings = EngineSettings(**settings)
        except TypeError as error:
            raise ConfigError(f"{error}: see tiercache.engine.EngineSettings") from None
        tokenizer = load_tokenizer(model)
        self.engine = Engine(model, engine_settings, None if daemon is None else connect_to(daemon))
        self._prompts = Prompts(tokenizer, chat_template, self.engine.max_model_len)
        self._text_engine = TextEngine(self.engine, self._prompts.tokenizer)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        params: Params = None,
        *,
        progress: bool = True,
        stall_timeout_s: float = 60.0,
    ) -> list[Generation]:
        """Continue texts (or token ids); results in their order. Blocks until all are done.

        Args:
            params: one for all prompts, or one for each.
            progress: show a bar on stderr, if stderr is a terminal.

        Raises ConfigError for a prompt that cannot be served (then none is), and DeadlineExceeded when
        nothing could be computed for `stall_timeout_s`.
        """
        each: Sequence[str | list[int]] = [prompts] if isinstance(prompts, str) else prompts
        generations = [
            Generation(one, self._prompts.of_text(one), []) if isinstance(one, str) else Generation(None, one, [])
            for one in each
        ]
        return self._serve(generations, params, progress, stall_timeout_s)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        template_values: dict[str, Any] | None = None,
        progress: bool = True,
        stall_timeout_s: float = 60.0,
    ) -> list[Generation]:
        """Answer a conversation, or several; like `generate`. `template_values` go to the chat template."""
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        generations = [
            Generation(None, self._prompts.of_chat(conversation, template_values), []) for conversation in conversations
        ]
        return self._serve(generations, params, progress, stall_timeout_s)

    def _serve(
        self, generations: list[Generation], params: Params, progress: bool, stall_timeout_s: float
    ) -> list[Generation]:
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(generations)
        if len(each) != len(generations):
            raise ConfigError(f"{len(each)} params for {len(generations)} prompts: give one for each, or one for all")
        for generation, own in zip(generations, each, strict=True):
            self.engine.check_request(generation.prompt_token_ids, own)
        under_way: dict[int, Generation] = {}
        try:
            for generation, own in zip(generations, each, strict=True):
                under_way[self._text_engine.add_request(generation.prompt_token_ids, own)] = generation
                generation.outputs = [Completion(index) for index in range(own.n)]
            with _progress_bar(progress) as bar:
                self._run(under_way, bar, stall_timeout_s)
        finally:
            for request_id in under_way:  # ended requests are no longer there
                self._text_engine.abort(request_id)
        return generations

    def _run(self, under_way: dict[int, Generation], bar: Progress, stall_timeout_s: float) -> None:
        ended, total, tokens = 0, sum(len(one.outputs) for one in under_way.values()), 0
        task = bar.add_task("", total=total, tokens=0)
        last, last_s = self.engine.progress, time.monotonic()
        while ended < total:
            for output in self._text_engine.step():
                tokens += 1
                ended += _note(under_way[output.request_id], output)
            bar.update(task, completed=ended, tokens=tokens)
            if self.engine.progress != last:
                last, last_s = self.engine.progress, time.monotonic()
            elif time.monotonic() - last_s > stall_timeout_s:
                raise DeadlineExceeded(f"nothing advanced for {stall_timeout_s} s: transfers hold the pool")

    def close(self) -> None:
        """Wait for transfers (10 s at most) and leave the daemon."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _note(generation: Generation, output: TextOutput) -> bool:
    """Add an output to its completion; returns whether the completion has ended."""
    completion, result = generation.outputs[output.index], output.result
    completion.text += output.text
    completion.token_ids.append(output.token)
    if output.logprobs is not None:
        completion.logprobs.append(output.logprobs)
    if result is None:
        return False
    completion.finish_reason = result.finish_reason
    generation.cached_tokens = result.pool_hit_tokens + result.external_hit_tokens
    return True


def _progress_bar(wanted: bool) -> Progress:
    console = Console(file=sys.stderr)
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        console=console,
        disable=not (wanted and console.is_terminal),
    )
