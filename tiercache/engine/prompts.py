"""Prompts: texts and conversations to tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError, ModelRefused

# Texts have fewer characters in a token, so the beginning of a text shows whether the text is too long.
_USUAL_TOKEN_CHARS = 8
_CUT_TOKENS = 64

Message = Mapping[str, Any]
"""One message of a conversation: `role`, `content`, and any other field that the model's template knows."""


def load_tokenizer(model_dir: str | Path) -> Any:
    """The tokenizer of a model folder. Raises ModelRefused if there is none."""
    from transformers import AutoTokenizer

    if not Path(model_dir).is_dir():
        raise ModelRefused(f"{model_dir} is not a folder: give that of a Hugging Face model, nothing is downloaded")
    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:
        # A missing or damaged tokenizer raises errors of any type.
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelRefused(
            f"transformers finds no tokenizer in {model_dir}: save one there, with its save_pretrained ({line})"
        ) from error


class Prompts:
    """A tokenizer with its chat template.

    Args:
        tokenizer: one of transformers'.
        chat_template: Jinja text that replaces the tokenizer's own.
        max_tokens: longer texts are refused, most of them without being read to their end; 0 means no limit.

    One thread at a time; long texts take a while (about a second per MB).
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None, max_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_tokens = max_tokens
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))
        # Callers may pass any value to the template except those that control the tokenizer itself.
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}

    def of_text(self, text: str) -> list[int]:
        """Tokens of a text, with the model's special tokens at its beginning."""
        return self._encode(text, add_special_tokens=True)

    def of_chat(self, messages: Sequence[Message], template_values: Mapping[str, Any] | None = None) -> list[int]:
        """Tokens of a conversation, up to where the model's answer begins.

        `template_values` are further variables of the template. Raises ConfigError when the model has no
        template, or its template refuses the conversation.
        """
        values = dict(template_values or {})
        if wrong := sorted(self._reserved & values.keys()):
            raise ConfigError(f"{', '.join(wrong)} is not for a chat template: leave it out")
        if not (self._chat_template or getattr(self.tokenizer, "chat_template", None)):
            raise ConfigError("the model has no chat template: give one (chat_template), or use completions")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **values,
            )
        except Exception as error:
            # Templates are programs of the model's authors, and refuse unknown input in their own ways.
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"the chat template refuses these messages: {line}") from error
        return self._encode(text, add_special_tokens=False)  # the template has written the special tokens

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError("the text has half a surrogate pair: it must be Unicode") from None
        if self._max_tokens and self._is_too_long(text):
            limit = f"the {self._max_tokens} tokens that a sequence may have"
            raise ConfigError(f"a text of {len(text)} characters has more than {limit}: shorten it")
        tokens: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return tokens

    def _is_too_long(self, text: str) -> bool:
        """True if a text certainly has too many tokens; it may miss some that do."""
        if len(text) > self._max_tokens * self._max_token_chars:
            return True
        beginning = self._max_tokens * _USUAL_TOKEN_CHARS
        if len(text) <= beginning:
            return False
        # The cut may change the last tokens, and adds a few at most.
        tokens = self.tokenizer(text[:beginning], add_special_tokens=False)["input_ids"]
        return len(tokens) > self._max_tokens + _CUT_TOKENS
