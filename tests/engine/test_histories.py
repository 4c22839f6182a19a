"""Random histories of an engine over a cache that fails: the books after each step, and every token in the end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cache import MemoryCache
from plain_model import choices, context_of, plain_engine

from tiercache.engine import Engine, RequestOutput, SamplingParams

pytestmark = pytest.mark.engine
# Prompts with common beginnings: a system prompt, two conversations on it, and a stranger.
ROOTS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9], [11, 12, 13])
ACTIONS = {
    "add": 5,
    "step": 12,
    "abort": 1,
    "hold": 1,
    "finish": 2,
    "spoil": 1,
    "refuse": 0.2,
    "lose": 0.3,
    "work": 2,
    "evict": 0.5,
}
MAX_STEPS = 2000


class History:
    """One engine, what was asked of it, and what came back."""

    def __init__(self, engine: Engine, cache: MemoryCache, choose: random.Random) -> None:
        self.engine, self.cache, self.choose, self.sees = engine, cache, choose, engine._model.sees
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[int] = set()
        self.outputs: list[RequestOutput] = []

    def act(self, action: str) -> None:
        if action == "add":
            self.add()
        elif action == "step":
            self.outputs += [one.output for one in self.engine.step() if one.output is not None]
        elif action == "abort" and self.asked:
            request_id = self.choose.choice(sorted(self.asked)[-6:])
            self.outputs += self.engine.abort(request_id)
            self.aborted.add(request_id)
        elif action == "hold":
            self.cache.hold_transfers = True
        elif action == "finish":
            self.cache.hold_transfers = False
            self.cache.finish_all()
        elif action == "spoil":
            self.cache.good_blocks = self.choose.randint(0, 3)
        elif action == "refuse":
            self.cache.refuse = True
        elif action == "lose":
            self.choose.choice(self.cache.groups).blocks.clear()
        elif action == "evict":
            blocks = self.choose.choice(self.cache.groups).blocks
            for key in self.choose.sample(sorted(blocks), min(2, len(blocks))):
                del blocks[key]
        elif action == "work":
            self.cache.good_blocks, self.cache.refuse = 1 << 30, False
        self.engine.check_integrity()

    def add(self) -> None:
        choose = self.choose
        prompt = [*choose.choice(ROOTS), *(choose.randint(1, 3) for _ in range(choose.randint(0, 8)))]
        n, seed = choose.choice((1, 1, 1, 2, 3)), choose.randint(0, 1000)
        params = SamplingParams(n=n, max_tokens=choose.randint(1, 14), temperature=1.0, seed=seed, ignore_eos=True)
        request_id = self.engine.add_request(prompt, params, priority=choose.randint(0, 2))
        self.asked[request_id] = (list(prompt), params)

    def end(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.unfinished:
                break
            self.act("step")
        assert not self.engine.unfinished, "the engine does not come to an end"
        for output in self.outputs:
            prompt, params = self.asked[output.request_id]
            for position, token in enumerate(output.tokens):
                assert token in choices(context_of(prompt + output.tokens[:position], self.sees))
            assert len(output.tokens) == params.max_tokens or output.request_id in self.aborted
        ended = sorted((output.request_id, output.index) for output in self.outputs)
        assert len(set(ended)) == len(ended)
        for request_id, (_, params) in self.asked.items():
            if request_id not in self.aborted:
                assert [index for one, index in ended if one == request_id] == list(range(params.n))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    exact=st.booleans(),
    write=st.sampled_from(("through", "back")),
    caching=st.sampled_from((True, True, False)),
    chunked=st.booleans(),
    spare_blocks=st.integers(0, 8),
    always_load=st.booleans(),
    sees=st.sampled_from(((0, 0), (0, 0), (1, 0), (4, 0), (7, 0), (4, 2), (3, 4))),
    windows=st.sampled_from(((), (), (0, 1), (0, 4), (7, 0), (3, 0, 3, 3), (4, 4, 0, 4, 0))),
)
def test_any_history_gives_the_right_tokens_and_everything_back(
    seed: int,
    exact: bool,
    write: str,
    caching: bool,
    chunked: bool,
    spare_blocks: int,
    always_load: bool,
    sees: tuple[int, int],
    windows: tuple[int, ...],
) -> None:
    cache = MemoryCache()
    sees = (0, 0) if windows else sees
    # What the longest request needs alone, in as many groups of layers as there are, and little more.
    groups = {0: 1, 2: 2, 4: 4, 5: 3}[len(windows)]
    pool_blocks = 16 + (8 if chunked else 16) * (groups - 1) + spare_blocks
    with plain_engine(
        cache.connect,
        exact=exact,
        write=write,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        pool_blocks=pool_blocks,
        clean_blocks=2,
        load_timeout_s=0.001,
        always_load=always_load,
        window=sees[0],
        sinks=sees[1],
        windows=windows,
    ) as engine:
        choose = random.Random(seed)
        assert len(engine._model.sees) == groups
        history = History(engine, cache, choose)
        for action in choose.choices(list(ACTIONS), list(ACTIONS.values()), k=120):
            history.act(action)
        history.act("finish")
        history.end()
        assert engine.drain()
        engine.check_integrity()
        assert engine.stats()["idle_blocks"] == pool_blocks
        assert not cache.leases
