"""The offline class: texts and conversations in, texts out, over the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tiercache
from tiercache.engine import LLM, SamplingParams
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
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
