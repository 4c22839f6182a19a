"""Answers in the two forms of OpenAI's interface, whole or streamed in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercache.engine.async_engine import StreamOutput
from tiercache.engine.sampling import TokenLogprobs

# JSON has no minus infinity.
_LEAST_LOGPROB = -9999.0


class TokenTexts:
    """The text of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token]))
        return self._texts[token]


@dataclass(slots=True)
class Usage:
    """Tokens of a request so far."""

    prompt: int
    completion: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    def note(self, item: StreamOutput) -> None:
        self.completion += 1
        if (result := item.output.result) is not None:
            # The same for all sequences of a prompt: the prompt was looked up once.
            self.cached[item.prompt] = result.pool_hit_tokens + result.external_hit_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass(slots=True)
class Piece:
    """A piece of the text of one choice, with its tokens, log-probabilities and finish reason."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, item: StreamOutput) -> None:
        output = item.output
        self.text += output.text
        if output.logprobs is not None:
            self.tokens.append(output.token)
            self.logprobs.append(output.logprobs)
        if output.result is not None:
            self.finish_reason = output.result.finish_reason

    @property
    def empty(self) -> bool:
        """True if the piece holds nothing that a client would see."""
        return not (self.text or self.logprobs or self.finish_reason)


class CompletionAnswer:
    """The form of `/v1/completions`."""

    whole_kind = piece_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, model: str, texts: TokenTexts) -> None:
        self._texts = texts
        self._offsets: dict[int, int] = {}
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(piece, streamed=False) for piece in pieces]
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": usage.body()}

    def first(self, index: int) -> dict[str, Any] | None:
        """Events sent before the first piece of a choice."""
        return None

    def piece(self, piece: Piece) -> dict[str, Any]:
        return self._chunk([self._choice(piece, streamed=True)])

    def last(self, usage: Usage) -> dict[str, Any]:
        """Events sent after the last piece, if asked for."""
        return {**self._chunk([]), "usage": usage.body()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.piece_kind, "choices": choices}

    def _choice(self, piece: Piece, *, streamed: bool) -> dict[str, Any]:
        logprobs = self._logprobs(piece) if piece.logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        offset = self._offsets.get(piece.index, 0)
        offsets = []
        for token in piece.tokens:
            offsets.append(offset)
            offset += len(self._texts.of(token))
        self._offsets[piece.index] = offset
        top = [
            {self._texts.of(other): max(value, _LEAST_LOGPROB) for other, value in [*each.top, (token, each.logprob)]}
            for token, each in zip(piece.tokens, piece.logprobs, strict=True)
        ]
        return {
            "tokens": [self._texts.of(token) for token in piece.tokens],
            "token_logprobs": [max(each.logprob, _LEAST_LOGPROB) for each in piece.logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }


class ChatAnswer(CompletionAnswer):
    """The form of `/v1/chat/completions`."""

    whole_kind = "chat.completion"
    piece_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def first(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, piece: Piece, *, streamed: bool) -> dict[str, Any]:
        message = {"content": piece.text} if streamed else {"role": "assistant", "content": piece.text}
        return {
            "index": piece.index,
            "delta" if streamed else "message": message,
            "logprobs": self._logprobs(piece) if piece.logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        content = [
            {**self._entry(token, each.logprob), "top_logprobs": [self._entry(*other) for other in each.top]}
            for token, each in zip(piece.tokens, piece.logprobs, strict=True)
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts.of(token)
        # Half a character has no text, so its bytes are not known here.
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        data = list(text.encode()) if whole else None
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": data}
