"""What the affinity query says of an engine's prompts is what the engine then loads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from random_models import prompt_of

import tiercache
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to
from tiercache.http.affinity import Affinity, Query, UnknownModel

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("all_hits_are_loaded")]
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True)
PROMPT = prompt_of(120)


def test_the_engine_is_known_by_its_folder(llama: Path) -> None:
    settings = EngineSettings(
        block_size=8, chunk_size=32, pool_blocks=64, salt="s3cret", tier_dtype="int8", exact=False
    )
    with (
        tiercache.launch(arena="64MiB") as daemon,
        tiercache.Client.connect(daemon.address, map_arena=False, request_timeout_s=30.0) as client,
        Engine(llama, settings, connect_to(daemon.address, required=True)) as engine,
    ):
        affinity = Affinity(client)

        def matched(tokens: list[int], model: str = llama.name, salt: str = "s3cret") -> int:
            """As soon as the model is known."""
            deadline_s = time.monotonic() + 30
            while True:
                try:
                    return int(affinity.ask(Query(model=model, tokens=tokens, salt=salt))["matched"])
                except UnknownModel:
                    assert time.monotonic() < deadline_s, "the engine announces its model"
                    time.sleep(0.01)

        assert matched(PROMPT) == 0
        engine.generate([PROMPT], GREEDY)
        assert engine.drain()
        stored = engine.stats()["stored"] * 8
        assert [matched(PROMPT), matched(PROMPT, str(llama)), matched(PROMPT, salt="")] == [stored, stored, 0]
        assert stored >= 96
        other = PROMPT[:50] + prompt_of(70, seed=1)
        expected = matched(other)
        engine.reset_pool()
        [output] = engine.generate([other], GREEDY)
        assert output.external_hit_tokens == expected == 48
