"""Text that comes piece by piece is the text of all tokens; nothing of a stop string is shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import byte_tokenizer, word_tokenizer

from tiercache.engine.text_engine import Detokenizer, StopStrings

pytestmark = pytest.mark.engine
BYTES, WORDS = byte_tokenizer(), word_tokenizer()
THE, SPACE, BARE_THE, CAT, S, DOT, TWO_SPACES = range(257, 264)


def pieces(tokenizer: Any, tokens: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.flush()]


@settings(deadline=None)
@given(text=st.text(), prompt=st.text(max_size=8))
def test_bytes_become_the_characters_that_they_are(text: str, prompt: str) -> None:
    tokens = BYTES(text)["input_ids"]
    found = pieces(BYTES, tokens, BYTES(prompt)["input_ids"])
    assert "".join(found) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        # A character is shown with its last byte.
        ends = [len(text[: end + 1].encode()) - 1 for end in range(len(text))]
        assert [piece for place, piece in enumerate(found) if place in ends] == list(text)


@settings(deadline=None)
@given(words=st.lists(st.sampled_from([THE, SPACE, BARE_THE, CAT, S, DOT, TWO_SPACES])), euro=st.booleans())
def test_spaces_stay_where_words_carry_them(words: list[int], euro: bool) -> None:
    prompt = [THE, CAT]
    tokens = [*words, *[1 + byte for byte in "€".encode()] * euro, *words]
    assert WORDS.decode(prompt) + "".join(pieces(WORDS, tokens, prompt)) == WORDS.decode(prompt + tokens)


@settings(deadline=None, max_examples=30)
@given(tokens=st.lists(st.integers(128, 260), max_size=60))
def test_garbage_is_shown_too_and_does_not_pile_up(tokens: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    for token in tokens:
        detokenizer.add(token % len(BYTES))
        assert len(detokenizer._pending) < 8
    detokenizer.flush()


# --- stop strings


def shown(stops: list[str], *texts: str) -> tuple[str, bool]:
    checker = StopStrings(stops)
    out = ""
    for text in texts:
        cut = checker.add(text)
        out += cut.text
        if cut.stopped:
            return out, True
    return out + checker.flush(), False


def test_a_stop_string_ends_the_text_wherever_it_is_split() -> None:
    for split in range(8):
        assert shown(["END"], "abENDcd"[:split], "abENDcd"[split:]) == ("ab", True)
    assert shown(["END"], *"abENDcd") == ("ab", True)


@given(
    texts=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_the_split_never_matters_but_for_which_stop_is_seen_first(texts: list[str], stops: list[str]) -> None:
    whole = "".join(texts)
    out, stopped = shown(stops, *texts)
    assert stopped == any(stop in whole for stop in stops)
    assert whole.startswith(out)
    assert not any(stop in out for stop in stops)
    assert stopped or out == whole
