"""Models whose layers do not all keep K and V of every token, on real vLLM: recurrent states, blocks of two sizes.

Tokens are right if they are those that the same engine computed before there was a daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hybrids import KINDS, LONG, Case, Kind, flush_kind
from vllm_engines import Engine, flush, launch, offloading_config, prompt, statistics, stored_blocks, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def saved(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> str:
    return kind.save(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def case(kind: Kind, saved: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("case")
    settings = {"request_timeout_s": 2.0}
    engine = Engine(saved, folder / "log", str(folder / "d"), settings, dtype=kind.dtype)
    yield Case(kind, engine, folder / "d")
    engine.close()


def test_prompts_of_every_length_come_back_up_to_their_last_token(case: Case) -> None:
    unit = case.unit
    lengths = {unit - 1, unit, unit + 1, 2 * unit, 2 * unit + 1, 3 * unit - 1, 500, 3 * unit + unit // 2, 512, 640, 700}
    prompts = [LONG[:length] for length in sorted(lengths, reverse=True)]
    case.compute(*prompts)
    with case.launch():
        assert case.cached(LONG) == 0
        case.store(LONG)
        for ids in prompts:  # with the states of others, or without
            assert case.cached(ids) <= case.usable(ids)
        case.store(*prompts)
        assert case.engine.ask("check")["idle"]


@pytest.mark.parametrize("state", [True, False])
def test_one_kind_of_blocks_is_lost(case: Case, state: bool) -> None:
    """Without states there is no hit, and without the rest neither; what is computed then is stored again."""
    case.compute(LONG)
    with case.launch() as daemon:
        case.store(LONG)
        assert flush_kind(daemon, state)
        assert case.cached(LONG) == 0
        case.store(LONG)


def test_requests_that_are_preempted(case: Case, saved: str, start: Start) -> None:
    """A pool is too small for all: requests lose their blocks and states in mid answer, and begin again."""
    kind, unit = case.kind, case.unit
    prompts = [LONG[: unit + 9 * number] + prompt(20, str(number)) for number in range(6)]
    tokens, exact = 2 * unit, 2 * unit if kind.dtype == "float32" else 4
    case.compute(*prompts, tokens=tokens)
    turns = [ids + case.right(ids, tokens) for ids in prompts]
    case.compute(*turns)
    with case.launch() as daemon:
        options = {"model": saved, "dtype": kind.dtype, "max_num_batched_tokens": 200}
        engine = start(daemon.address, num_gpu_blocks_override=20, max_model_len=6 * unit, **options)
        for _ in range(2):
            answers, _ = engine.regenerate(prompts, tokens)
            assert [answer[:exact] for answer in answers] == [case.right(ids, tokens)[:exact] for ids in prompts]
            assert engine.ask("check")["preemptions"]
        assert engine.counts()["loaded_blocks"]
        engine.close()
        hits = [case.cached(ids, compare=kind.dtype == "float32") for ids in turns]
        assert any(hit > len(ids) for hit, ids in zip(hits, prompts, strict=True)), hits  # blocks of answers are there


def test_below_the_offloading_of_vllm(case: Case, saved: str, start: Start) -> None:
    kind = case.kind
    prompts = [LONG, LONG[:500], LONG[: 3 * case.unit], LONG[: 3 * case.unit + 1]]
    case.compute(*prompts)
    with launch("64MiB", region="16MiB") as daemon:
        tier = {"address": str(daemon.address), "request_timeout_s": 5.0}
        config = offloading_config(tier, rows=64, row=512 << 10, answers=True)
        engine = start(model=saved, dtype=kind.dtype, kv_transfer_config=config)

        def found(ids: list[int]) -> bool:
            """Whether a prompt comes back, but for a part of its last block: vLLM itself decides where a hit ends."""
            [answer], [cached] = engine.regenerate([ids], 8)
            assert answer == case.right(ids), (len(ids), cached)
            return case.usable(ids) - (0 if kind.state else case.unit) <= cached < len(ids)

        def whole(blocks: int) -> bool:
            """Whether every part of the model has so many blocks. What waits for a step of vLLM gets one."""
            engine.generate([[5, 6, 7]], 1)
            return all(space["blocks"] >= blocks for space in statistics(daemon)["namespaces"])

        for ids in prompts:
            wait_until(lambda ids=ids: found(ids))
        assert stored_blocks(daemon)
        assert all(found(ids) for ids in prompts)
        if not kind.state:  # an answer is stored as it grows, in pieces where blocks are of two sizes
            flush(daemon)
            engine.regenerate([LONG[: case.unit - 7]], 3 * case.unit)
            wait_until(lambda: whole(3))
        engine.close()
