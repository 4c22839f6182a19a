"""A model for use in a program: texts or conversations in, texts out.

with LLM("path/to/model") as llm:
    [answer] = llm.chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(answer.outputs[0].text)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tiercache.engine.connect import connect_to
from tiercache.engine.engine import Engine
from tiercache.engine.prompts import Message, Prompts, load_tokenizer
from tiercache.engine.sampling import SamplingParams, TokenLogprobs
from tiercache.engine.settings import EngineSettings
from tiercache.engine.text_engine import TextEngine, TextOutput
from tiercache.errors import ConfigError, DeadlineExceeded

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
