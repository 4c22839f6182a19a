"""Calls of `generate`, served or not: what comes out is what comes out of the model alone."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from tiny_models import Open, greedy, prompt, tiny_model
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation import GenerationMixin

pytestmark = pytest.mark.engine
IDS = prompt(64)
ONES = torch.ones_like(IDS)
PADDED = torch.cat([torch.zeros(1, 24, dtype=torch.long), prompt(40)], dim=1)
ANSWER = {"max_new_tokens": 8, "eos_token_id": None}


def config(**settings: Any) -> GenerationConfig:
    return GenerationConfig(**{**ANSWER, **settings})


def said(output: Any) -> list[list[int]]:
    return list(getattr(output, "sequences", output).tolist())


SERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "sampled": ({}, {"do_sample": True, "top_k": 20}),
    "a config": ({}, {"generation_config": config()}),
    "a config, positional": ({}, {"positional": [IDS, config()]}),
    "inputs": ({}, {"inputs": IDS, "input_ids": None}),
    "no mask": ({}, {"attention_mask": None}),
    "several answers": ({}, {"num_return_sequences": 2, "do_sample": True}),
    "several answers by default": ({"num_return_sequences": 2, "do_sample": True}, {"generation_config": config()}),
    "scores": ({}, {"output_scores": True, "return_dict_in_generate": True}),
    "its own positions": ({}, {"position_ids": torch.arange(64)[None]}),
    "hybrid by default, which transformers ignores": ({"cache_implementation": "hybrid"}, {}),
    "no cache by default, but here": ({"use_cache": False}, {"use_cache": True}),
}
BYPASSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a prefill in chunks": ({}, {"prefill_chunk_size": 10}),
    "a prefill in chunks by default": ({"prefill_chunk_size": 10}, {"generation_config": config()}),
    "beams": ({}, {"num_beams": 2}),
    "beams by default": ({"num_beams": 2}, {"generation_config": config()}),
    "a static cache by default": ({"cache_implementation": "static"}, {"generation_config": config()}),
    "a static cache": ({}, {"cache_implementation": "static"}),
    "drafts from the prompt by default": ({"prompt_lookup_num_tokens": 3}, {"generation_config": config()}),
    "a draft model": ({}, {"assistant_model": tiny_model("LlamaConfig", seed=3)}),
    "no cache by default": ({"use_cache": False}, {"generation_config": config()}),
    "no cache": ({}, {"use_cache": False}),
    "attentions": ({}, {"output_attentions": True}),
    "other positions": ({}, {"position_ids": torch.arange(64)[None] * 2}),
    "positions of a half type": ({}, {"position_ids": torch.arange(64, dtype=torch.bfloat16)[None]}),
    "a cache of its own": ({}, {"past_key_values": DynamicCache}),
    "its own way to generate": ({}, {"custom_generate": GenerationMixin._sample}),
    "a mask of other values": ({}, {"attention_mask": ONES * 2}),
    "a mask that is too long": ({}, {"attention_mask": torch.ones(1, 65), "position_ids": torch.arange(64)[None]}),
    "more positional arguments": ({}, {"positional": [IDS, config(), LogitsProcessorList()]}),
    "ids as embeddings": ({}, {"input_ids": None, "inputs_embeds": torch.ones(1, 64, 64)}),
    "a mask with a hole": ({}, {"attention_mask": torch.cat([ONES[:, :20], ONES[:, :5] * 0, ONES[:, 25:]], dim=1)}),
}


def run(target: Any, options: dict[str, Any]) -> list[list[int]]:
    options = {name: value() if value is DynamicCache else value for name, value in options.items()}
    positional = options.pop("positional", [])
    own = {} if positional else {"input_ids": IDS}
    answer = {} if positional or "generation_config" in options else ANSWER
    options = {**own, "attention_mask": ONES, **answer, **options}
    torch.manual_seed(5)
    return said(target.generate(*positional, **{name: value for name, value in options.items() if value is not None}))


@pytest.mark.parametrize("served", [True, False], ids=["served", "bypassed"])
def test_each_call_says_what_the_model_says(open_cache: Open, served: bool) -> None:
    wrong = {}
    for name, (defaults, options) in (SERVED if served else BYPASSED).items():
        model = tiny_model("LlamaConfig")
        cache = open_cache(model, salt=name)
        cache.generate(IDS, ONES, max_new_tokens=1)
        loaded = cache.connector.counters["loaded_blocks"]
        for setting, value in defaults.items():
            setattr(model.generation_config, setting, value)
        expected = run(model, options)
        right = [run(cache, options) == expected for _ in range(2)]
        hits = bool(cache.connector.counters["loaded_blocks"] - loaded)
        if (right, hits, cache.bypassed) != ([True, True], served, 0 if served else 2):
            wrong[name] = right, hits, cache.bypassed
    assert not wrong


@pytest.mark.parametrize("masked_first", [False, True])
def test_padding_that_transformers_finds_by_itself_is_padding(open_cache: Open, masked_first: bool) -> None:
    """Without a mask the padding token of the model's defaults hides tokens; with a mask of ones it is a token."""
    model = tiny_model("LlamaConfig")
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    options: list[dict[str, Any]] = [
        {"inputs": PADDED, "generation_config": GenerationConfig(max_new_tokens=8)},
        {"inputs": PADDED, "attention_mask": ONES, "generation_config": GenerationConfig(max_new_tokens=8)},
    ]
    expected = [said(model.generate(**one)) for one in options]
    assert expected[0] != expected[1]
    cache = open_cache(model)
    for _ in range(2):
        for number in (0, 1) if masked_first else (1, 0):
            assert said(cache.generate(**options[number])) == expected[number]
    assert cache.bypassed == 0
    assert cache.connector.counters["loaded_blocks"] == 39 // 16 + 63 // 16, "the last token is computed"


class Streamer:
    def __init__(self) -> None:
        self.put_tokens: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("use_cache", [True, False], ids=["served", "bypassed"])
def test_a_streamer_sees_each_token_once(open_cache: Open, use_cache: bool) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    streamers = Streamer(), Streamer(), Streamer()
    for target, streamer in zip((model, cache, cache), streamers, strict=True):
        target.generate(input_ids=IDS, attention_mask=ONES, streamer=streamer, use_cache=use_cache, **ANSWER)
    assert [(one.put_tokens, one.ends) for one in streamers[1:]] == [(streamers[0].put_tokens, 1)] * 2


class WritingStreamer(Streamer):
    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if value.ndim == 2:
            value[:, :8] = 7


def test_what_a_streamer_writes_into_the_prompt_is_computed_and_not_stored(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    cache.generate(IDS, ONES, **ANSWER)
    stored = cache.connector.counters["stored_blocks"]
    streamers = WritingStreamer(), WritingStreamer()
    expected, found = (
        said(target.generate(IDS.clone(), attention_mask=ONES, streamer=streamer, do_sample=False, **ANSWER))
        for target, streamer in zip((model, cache), streamers, strict=True)
    )
    assert expected == found != said(model.generate(IDS, attention_mask=ONES, **ANSWER))
    assert streamers[0].put_tokens == streamers[1].put_tokens
    assert cache.connector.counters["stored_blocks"] == stored


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": lambda: 2}, {"position_ids": lambda: IDS * 2}, {"past_key_values": DynamicCache}],
    ids=["served", "beams", "positions", "a cache of its own"],
)
def test_the_inputs_of_a_call_are_freed_when_it_returns(open_cache: Open, options: dict[str, Any]) -> None:
    """And not when the garbage collector runs: they may be gigabytes."""
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    inputs = {"input_ids": IDS.clone(), **{name: make() for name, make in options.items()}}
    seen = [weakref.ref(value) for value in inputs.values() if not isinstance(value, int)]
    gc.collect()
    gc.disable()
    try:
        cache.generate(**inputs, attention_mask=ONES, max_new_tokens=2, do_sample=False)
        inputs.clear()
        assert [one() is None for one in seen] == [True] * len(seen)
    finally:
        gc.enable()


def test_wrong_arguments_are_refused_as_by_the_model(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    for options in ({"no_such_option": 1}, {"attention_mask": [[1] * 64]}, {"max_new_tokens": -1}):
        raised = []
        for target in (model, cache):
            with pytest.raises(Exception, match=r".") as caught:
                target.generate(IDS, **options)
            raised.append((caught.type, str(caught.value)))
        assert raised[0] == raised[1]


def test_a_row_without_a_token_goes_without_the_cache(open_cache: Open) -> None:
    """transformers gives all of its padding the first place, and so its answer the second."""
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    ids, mask = torch.cat([prompt(40), torch.zeros(1, 40, dtype=torch.long)]), torch.ones(2, 40, dtype=torch.long)
    mask[1] = 0
    assert greedy(cache, ids, attention_mask=mask) == greedy(model, ids, attention_mask=mask)
    assert (cache.bypassed, cache.connector.counters["stored_blocks"]) == (1, 0)


def test_what_a_processor_writes_into_the_tokens_is_not_what_was_computed(open_cache: Open) -> None:
    model, ids = tiny_model("LlamaConfig"), prompt(100)
    cache = open_cache(model)

    def edit(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids[:, 5] = 8
        return scores

    said = [greedy(target, ids.clone(), logits_processor=[edit]) for target in (cache, model)]
    assert said[0] == said[1]
    assert cache.connector.counters["stored_blocks"] == 0
    assert greedy(cache, ids) == greedy(model, ids)
    assert cache.connector.counters["stored_blocks"] > 0


@pytest.mark.parametrize("writer", ["processor", "streamer"])
def test_what_is_written_into_the_mask_does_not_name_what_was_computed(open_cache: Open, writer: str) -> None:
    """transformers has the mask that it was given, whose owner may use it again."""
    model, masks = tiny_model("LlamaConfig"), [(PADDED != 0).long() for _ in range(2)]
    cache, found = open_cache(model), []
    for target, mask in zip((model, cache), masks, strict=True):
        streamer = Streamer()

        def write(ids: torch.Tensor, scores: Any = None, mask: torch.Tensor = mask) -> Any:
            mask[:, :29] = 0
            return scores

        streamer.put = write  # type: ignore[method-assign]
        options = {"logits_processor": [write]} if writer == "processor" else {"streamer": streamer}
        found.append(greedy(target, PADDED, attention_mask=mask, **options))
    assert found[0] == found[1]
    assert cache.connector.counters["stored_blocks"] == (3 if writer == "processor" else 0)
    for ids in (PADDED[:, 24:], PADDED[:, 29:]):
        assert greedy(cache, ids) == greedy(model, ids)
    assert cache.connector.counters["loaded_blocks"] == (2 if writer == "processor" else 0)


@pytest.mark.parametrize("part", ["restore", "store"])
def test_a_cache_that_fails_in_any_way_is_a_miss(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    model, ids = tiny_model("LlamaConfig"), prompt(60)
    cache = open_cache(model)

    def fail(*_: object) -> None:
        raise RuntimeError("of some kind")

    monkeypatch.setattr(cache, "_match" if part == "restore" else "_store_row", fail)
    assert greedy(cache, ids) == greedy(model, ids)
    assert "RuntimeError: of some kind" in caplog.text


def test_a_signal_handler_in_the_midst_of_a_call_gets_a_miss(open_cache: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the thread that has the staging buffer, and would wait for itself."""
    model, ids = tiny_model("LlamaConfig"), prompt(60)
    cache, inner = open_cache(model), list[int]()
    greedy(cache, ids)
    real = cache._load_row  # rule: the call is in the midst of it

    def load(*arguments: Any) -> int:
        inner.append(cache.restore(ids).get_seq_length())
        return real(*arguments)

    monkeypatch.setattr(cache, "_load_row", load)
    assert greedy(cache, ids) == greedy(model, ids)
    assert inner == [0]


class SignalAtOnce:
    """A lock of whose taking a signal learns before the thread that takes it does."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.taken = 0

    def acquire(self, timeout: float = -1.0) -> bool:
        got = self._lock.acquire(timeout=timeout)
        self.taken += 1
        if self.taken == 1:
            signal.raise_signal(signal.SIGUSR1)
        return bool(got)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_signal_handler_that_comes_as_the_buffer_is_taken_may_use_it(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("LlamaConfig"), prompt(60)
    cache, inner = open_cache(model), list[int]()
    greedy(cache, ids)
    monkeypatch.setattr(cache, "_lock", SignalAtOnce(cache._lock))
    before = signal.signal(signal.SIGUSR1, lambda *_: inner.append(cache.restore(ids).get_seq_length()))
    try:
        assert greedy(cache, ids) == greedy(model, ids)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (inner, cache.connector.counters["loaded_blocks"]) == ([48], 6)


def test_a_call_waits_no_longer_for_other_threads_than_a_load_may_take(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny_model("LlamaConfig"), prompt(60)
    cache = open_cache(model)
    greedy(cache, ids)
    monkeypatch.setattr(cache.connector, "load_timeout_s", 0.0)
    holds, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._lock:
            holds.set()
            ends.wait()

    other = threading.Thread(target=hold)
    other.start()
    holds.wait()
    try:
        assert greedy(cache, ids) == greedy(model, ids)
        assert cache.restore(ids).get_seq_length() == 0
    finally:
        ends.set()
        other.join()
    assert caplog.text.count("the staging buffer is in use by calls of other threads") == 1
    for load_timeout_s in (30.0, float("inf")):
        monkeypatch.setattr(cache.connector, "load_timeout_s", load_timeout_s)
        assert cache.restore(ids).get_seq_length() == 48
