"""The offline class: texts and conversations in, texts out, over the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import byte_tokenizer, word_tokenizer

import tiercache
from tiercache.engine import LLM, SamplingParams
from tiercache.engine.llm import Detokenizer, StopStrings
from tiercache.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("patient")]
SETTINGS = {"block_size": 8, "chunk_size": 32, "pool_blocks": 96}
PROMPT = "Good morning, said the cat to the"


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, **SETTINGS) as llm:
        yield llm


def params(**more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, **more})  # type: ignore[arg-type]


def test_a_stop_string_ends_the_text_and_the_computing(llm: LLM) -> None:
    whole = llm.generate(PROMPT, params(max_tokens=200))[0].outputs[0].text
    start = next(start for start in range(10, 100) if whole.index(whole[start : start + 3]) == start)
    stop = whole[start : start + 3]
    before = llm.engine.stats()["generation_tokens"]
    [completion] = llm.generate(PROMPT, params(max_tokens=200, stop=("nothing at all", stop)))[0].outputs
    assert (completion.text, completion.finish_reason) == (whole[:start], "stop")
    assert llm.engine.stats()["generation_tokens"] - before == len(completion.token_ids) == start + 3
    late = params(max_tokens=start + 4, min_tokens=start + 3, stop=(stop,))
    [completion] = llm.generate(PROMPT, late)[0].outputs
    assert (completion.text, completion.finish_reason) == (whole[: start + 4], "length")


def test_a_conversation_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "Purr."}, {"role": "user", "content": "Why?"}]
    [chat] = llm.chat(conversation, params())
    [plain] = llm.generate("<|system|>Purr.<end><|user|>Why?<end><|assistant|>", params())
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert chat.outputs == plain.outputs
    [moody] = llm.chat(conversation, params(), template_values={"mood": "Grr"})
    assert len(moody.prompt_token_ids) == len(chat.prompt_token_ids) + 3
    assert [one.outputs for one in llm.chat([conversation, conversation], params())] == [chat.outputs] * 2


def test_one_bad_prompt_and_nothing_is_served(llm: LLM) -> None:
    before = llm.engine.stats()["prompt_tokens"]
    with pytest.raises(ConfigError, match="exceed the"):
        llm.generate(["a", "b" * 900])
    with pytest.raises(ConfigError, match="2 params for 1 prompts"):
        llm.generate(["a"], [params(), params()])
    with pytest.raises(ConfigError, match="surrogate"):
        llm.generate(["\ud800"])
    assert not llm.engine.unfinished
    assert llm.engine.stats()["prompt_tokens"] == before


def test_a_second_process_finds_what_the_first_computed(model_dir: Path) -> None:
    with tiercache.launch("32MiB") as daemon:
        with LLM(model_dir, daemon=daemon.address, always_load=True, load_timeout_s=60.0, **SETTINGS) as first:
            [cold] = first.generate(PROMPT, params())
            assert first.engine.drain(60.0)
        with LLM(model_dir, daemon=daemon.address, always_load=True, load_timeout_s=60.0, **SETTINGS) as second:
            [warm] = second.generate(PROMPT, params())
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
    assert cold.outputs == warm.outputs


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
