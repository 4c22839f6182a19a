"""The engine's thread: many requests at once, cancelled ones, its failure and its end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercache.engine import Engine, EngineSettings, SamplingParams
from tiercache.engine.async_engine import AsyncEngine, EngineDied, QueueFull, Stalled, Stream, StreamUnread
from tiercache.engine.llm import TextEngine
from tiercache.engine.prompts import load_tokenizer

pytestmark = pytest.mark.engine
TIMEOUT_S = 60.0


@pytest.fixture
def text_engine(model_dir: Path) -> Iterator[TextEngine]:
    with Engine(model_dir, EngineSettings(block_size=8, chunk_size=32, pool_blocks=128)) as engine:
        yield TextEngine(engine, load_tokenizer(model_dir))


def run(text_engine: TextEngine, use: Callable[[AsyncEngine], Awaitable[None]], **limits: Any) -> list[str]:
    """Run `use` with an AsyncEngine in a loop of its own, then close it; returns the calls of `on_death`."""
    deaths: list[str] = []

    async def play() -> None:
        served = AsyncEngine(text_engine, on_death=lambda: deaths.append("died"), **limits)
        await asyncio.wait_for(use(served), TIMEOUT_S)
        await served.close()
        assert not served._waiting
        if not deaths:
            assert (served._places, served._request_ids, text_engine._texts) == ({}, {}, {})
            engine = text_engine.engine
            assert (engine.stats()["kv_cache_usage"], engine.unfinished) == (0, False)

    asyncio.run(play())
    return deaths


async def collect(stream: Stream) -> list[str]:
    """The text of each prompt."""
    texts = [""] * stream.prompts
    async for prompt, output in stream:
        texts[prompt] += output.text
    return texts


def prompt(seed: int, length: int = 12) -> list[int]:
    return [random.Random(f"{seed}/{place}").randrange(256) for place in range(length)]


def test_too_many_are_refused_and_nothing_of_them_stays(text_engine: TextEngine) -> None:
    params = SamplingParams(max_tokens=2)

    async def use(served: AsyncEngine) -> None:
        three = served.submit([prompt(1), prompt(2), prompt(3)], params)
        with pytest.raises(QueueFull, match="3 requests wait already, and 4 may"):
            served.submit([prompt(4), prompt(5)], params)
        served.submit([prompt(4)], params).close()
        assert [len(text) for text in await collect(three)] == [2, 2, 2]
        four = served.submit([prompt(number) for number in range(4)], params)
        await collect(four)

    run(text_engine, use, max_waiting=4)


def test_streams_may_be_closed_at_any_time(text_engine: TextEngine) -> None:
    rng = random.Random(3)

    async def leave(stream: Stream, after: int) -> None:
        async for _ in stream:
            after -= 1
            if after <= 0:
                break
        stream.close()
        stream.close()
        assert [item async for item in stream] == []

    async def use(served: AsyncEngine) -> None:
        readers = []
        for number in range(60):
            params = SamplingParams(max_tokens=8, n=rng.randint(1, 3), temperature=1.0, seed=number)
            stream = served.submit([prompt(number)] * rng.randint(1, 2), params)
            if number % 6 == 0:
                stream.close()
            readers.append(leave(stream, rng.randint(1, 60)))
            await asyncio.sleep(0)
        await asyncio.gather(*readers)

    assert run(text_engine, use) == []


def test_an_unread_stream_ends_and_frees_its_blocks(text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.engine.async_engine.MAX_UNREAD", 50)

    async def use(served: AsyncEngine) -> None:
        unread = served.submit([prompt(1)], SamplingParams(max_tokens=900))
        [read] = await collect(served.submit([prompt(2)], SamplingParams(max_tokens=100)))
        assert len(read) == 100
        while served.stats["running"]:
            await asyncio.sleep(0)
        assert served.stats["generation_tokens"] < 900
        with pytest.raises(StreamUnread, match="50 tokens were not read: read faster"):
            await collect(unread)
        assert await collect(unread) == [""]

    assert run(text_engine, use) == []


@pytest.mark.stress
def test_no_request_waits_for_blocks_that_never_come(text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(served: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(text_engine.engine._scheduler, "_has_room", lambda *_: False)
            waiting = asyncio.create_task(collect(served.submit([prompt(1)], SamplingParams())))
            others = []
            while not waiting.done():  # though other requests come all the time
                with contextlib.suppress(Stalled, QueueFull):
                    others.append(served.submit([prompt(2)], SamplingParams()))
                await asyncio.sleep(0.01)
            for stream in others:  # the last ones may have come after the earlier ones were cancelled
                stream.close()
            assert isinstance(error := waiting.exception(), Stalled)
            assert "has not advanced for" in str(error)
        while served.stall is not None:  # until those are cancelled
            await asyncio.sleep(0.01)
        [text] = await collect(served.submit([prompt(1)], SamplingParams(max_tokens=3)))
        assert len(text) == 3

    assert run(text_engine, use, stall_timeout_s=1.5) == []


def test_when_the_engine_fails_all_streams_learn_it(text_engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = text_engine.engine, []
    forward = engine._model.forward

    def failing(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 5:
            raise MemoryError("no memory for that")
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._model, "forward", failing)

    async def use(served: AsyncEngine) -> None:
        streams = [served.submit([prompt(number)], SamplingParams(max_tokens=50)) for number in range(80)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert {str(result) for result in results} == {"the engine has failed: MemoryError: no memory for that"}
        assert served.death is not None
        with pytest.raises(EngineDied, match="no memory"):
            served.submit([prompt(1)], SamplingParams())

    assert run(text_engine, use) == ["died"]
