"""An engine with text outputs: detokenises each step's tokens and checks stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tiercache.engine.engine import Engine
from tiercache.engine.outputs import RequestOutput, StepOutput
from tiercache.engine.sampling import SamplingParams, TokenLogprobs

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
