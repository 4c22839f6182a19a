"""The engine as a state machine: requests, steps, aborts and restarts, over a cache that fails in any way it may.

The oracle: each token is one that the model says after those before it; no block has two owners while it is computed
into, and the books are right after every step; what was served while nothing failed is found again, whole and by no
more loads than it takes; every request ends once; in the end every block and every lease is given back.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_cache import MemoryCache
from plain_model import MOST_STEPS, FakeClock, choices, context_of, plain_engine

from tiercache.engine import Engine, RequestOutput, SamplingParams

# Prompts with common beginnings: a system prompt, two conversations on it, and a stranger.
ROOTS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9], [11, 12, 13])
LONGEST_PROMPT, LONGEST_OUTPUT = 17, 14
TAILS = st.lists(st.integers(1, 3), max_size=8)
MODELS = (
    *({"window": window, "sinks": sinks} for window, sinks in ((0, 0), (0, 0), (1, 0), (4, 0), (7, 0), (4, 2), (3, 4))),
    *({"windows": windows} for windows in ((0, 1), (0, 4), (7, 0), (3, 0, 3, 3), (4, 4, 0, 4, 0))),
)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "exact": st.booleans(),
    "write": st.sampled_from(("through", "back")),
    "enable_prefix_caching": st.sampled_from((True, True, False)),
    "enable_chunked_prefill": st.booleans(),
    "always_load": st.sampled_from((True, True, False)),
    "max_stores": st.sampled_from((64, 1)),
}
TROUBLE = (
    *({"good_blocks": good} for good in range(4)),
    {"refuse": True},
    {"refuse_loads": True},
    {"refuse_others": True},
    {"flush_between": True},
    {"available": False},
    {"capacity": 6},
    {"boast_blocks": 2},
    {"hold_lookups": True},
)


class EngineMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.cache = MemoryCache(self.clock)
        self.running = ExitStack()
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[int] = set()
        self.ended: dict[tuple[int, int], RequestOutput] = {}
        self.fresh = 0

    @initialize(
        settings=st.fixed_dictionaries(SETTINGS),
        model=st.sampled_from(MODELS),
        spare_blocks=st.integers(0, 8),
        block_s=st.sampled_from((0.0, 0.01)),
    )
    def begin(self, settings: dict[str, Any], model: dict[str, Any], spare_blocks: int, block_s: float) -> None:
        # What the longest request needs alone, in as many groups of layers as there are, and little more.
        groups = {0: 1, 2: 2, 4: 4, 5: 3}[len(model.get("windows", ()))]
        more_groups = (8 if settings["enable_chunked_prefill"] else 16) * (groups - 1)
        self.cache.dram_block_s = block_s
        self.settings = {"pool_blocks": 16 + more_groups + spare_blocks, "clean_blocks": 2, **settings, **model}
        self.start()

    def start(self) -> None:
        self.engine: Engine = self.running.enter_context(
            plain_engine(self.cache.connect, clock=self.clock, token_s=0.001, **self.settings)
        )

    def step_once(self) -> None:
        self.note(one.output for one in self.engine.step() if one.output is not None)
        self.engine.check_integrity()

    def note(self, outputs: Any) -> None:
        """Every token is one of the two that the model says after those before it."""
        sees = self.engine._model.sees  # type: ignore[attr-defined]
        for output in outputs:
            prompt, params = self.asked[output.request_id]
            tokens = prompt + output.tokens
            for position in range(len(prompt), len(tokens)):
                assert tokens[position] in choices(context_of(tokens[:position], sees)), f"wrong at {position}"
            aborted = output.finish_reason == "abort"
            assert len(output.tokens) == params.max_tokens or aborted
            assert aborted == (output.request_id in self.aborted)
            assert (output.request_id, output.index) not in self.ended, "it ends twice"
            self.ended[output.request_id, output.index] = output

    # --- requests

    def add(self, prompt: list[int], params: SamplingParams, priority: int = 0) -> int:
        request_id = self.engine.add_request(prompt, params, priority)
        self.asked[request_id] = (list(prompt), params)
        return request_id

    @rule(
        root=st.sampled_from(ROOTS),
        tail=TAILS,
        n=st.sampled_from((1, 1, 1, 2, 3)),
        count=st.integers(1, LONGEST_OUTPUT),
        seed=st.integers(0, 1000),
        priority=st.integers(0, 2),
    )
    def ask(self, root: list[int], tail: list[int], n: int, count: int, seed: int, priority: int) -> None:
        params = SamplingParams(n=n, max_tokens=count, temperature=1.0, seed=seed, ignore_eos=True)
        self.add([*root, *tail], params, priority)

    @rule(
        roots=st.lists(st.sampled_from(ROOTS), min_size=2, max_size=4),
        tail=TAILS,
        counts=st.lists(st.integers(6, LONGEST_OUTPUT), min_size=4, max_size=4),
    )
    def ask_for_more_than_the_pool_holds(self, roots: list[list[int]], tail: list[int], counts: list[int]) -> None:
        for seed, (root, count) in enumerate(zip(roots, counts, strict=False)):
            params = SamplingParams(max_tokens=count, temperature=1.0, seed=seed, ignore_eos=True)
            self.add([*root, *tail[:seed]], params, priority=seed % 2)

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 5), count=st.integers(1, 5), tail=TAILS)
    def go_on_with_an_answer(self, which: int, count: int, tail: list[int]) -> None:
        output = list(self.ended.values())[-1 - which % len(self.ended)]
        prompt = (self.asked[output.request_id][0] + output.tokens + tail)[:LONGEST_PROMPT]
        self.add(prompt, SamplingParams(max_tokens=count, temperature=1.0, seed=which, ignore_eos=True))

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        request_id = list(self.asked)[-1 - which % len(self.asked)]
        outputs = self.engine.abort(request_id)
        if outputs:
            self.aborted.add(request_id)
        self.note(outputs)
        assert self.engine.abort(request_id) == []

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_once()

    @rule(count=st.integers(6, 20), seconds=st.sampled_from((0.0, 0.0, 0.3, 6.0)))
    def step_on(self, count: int, seconds: float) -> None:
        self.clock.sleep(seconds)
        self.step(count)

    # --- what the cache does

    @rule(which=st.integers(0, 20), hold=st.booleans())
    def finish_one(self, which: int, hold: bool) -> None:
        if self.cache.pending:
            self.cache.pending.pop(which % len(self.cache.pending)).finish()
        self.cache.hold_transfers = hold

    @rule()
    def finish_all(self) -> None:
        self.cache.hold_transfers = False
        self.cache.finish_all()

    @rule(changes=st.sampled_from(TROUBLE))
    def get_into_trouble(self, changes: dict[str, Any]) -> None:
        for name, value in changes.items():
            setattr(self.cache, name, value)

    @rule()
    def work_again(self) -> None:
        held = self.cache.hold_transfers
        self.cache.behave()
        self.cache.hold_transfers = held

    @rule(group=st.integers(0, 3), numbers=st.sets(st.integers(0, 30), max_size=3) | st.none())
    def lose_blocks(self, group: int, numbers: set[int] | None) -> None:
        """Some, or all that a group has."""
        blocks = self.cache.groups[group % len(self.cache.groups)].blocks
        for number, key in enumerate(list(blocks)):
            if numbers is None or number in numbers:
                del blocks[key]

    # --- what was served is found again

    def run_to_the_end(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.engine.unfinished:
                return
            self.step_once()
        raise AssertionError("the engine does not come to an end")

    @rule(length=st.integers(3, LONGEST_PROMPT), way=st.sampled_from(("pool", "reset", "restart")))
    def find_again(self, length: int, way: str) -> None:
        """A new prompt, served while all works, is found again in the pool, or else in the cache."""
        self.fresh += 1
        windows, whole = self.engine._groups.windows, (length - 1) // self.engine.settings.block_size
        # With a limit of one store, blocks may leave the window before their store begins.
        assume(self.fresh < 18 and self.engine.settings.always_load and self.engine.settings.max_stores > 1)
        assume(all(window.needed(whole) for window in windows))  # a window of one token needs no blocks
        self.cache.behave()
        self.run_to_the_end()
        prompt = [20 + self.fresh, *range(1, length)]
        first, _ = self.serve(prompt)
        assert self.engine.drain()
        if way == "reset":
            self.engine.reset_pool()
        elif way == "restart":
            self.restart()
        second, loaded = self.serve(prompt)
        found = whole * self.engine.settings.block_size if self.engine.settings.enable_prefix_caching else 0
        assert first.pool_hit_tokens + first.external_hit_tokens == 0
        assert (second.pool_hit_tokens, second.external_hit_tokens) == ((found, 0) if way == "pool" else (0, found))
        needed = sum(len(window.needed(whole)) for window in windows)
        assert loaded == (needed if way != "pool" and found else 0)

    def serve(self, prompt: list[int]) -> tuple[RequestOutput, int]:
        """The output, and how many blocks were loaded for it."""
        before = self.engine.stats()["loaded"]
        request_id = self.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        self.run_to_the_end()
        return self.ended[request_id, 0], int(self.engine.stats()["loaded"] - before)

    @precondition(lambda self: not self.engine.unfinished)
    @rule()
    def reset_pool(self) -> None:
        self.cache.hold_transfers = self.cache.hold_lookups = False
        self.cache.finish_lookups()
        self.cache.finish_all()
        self.engine.reset_pool()
        assert self.engine.stats()["idle_blocks"] == self.engine.stats()["pool_blocks"]

    @precondition(lambda self: not self.engine.unfinished)
    @rule()
    def restart(self) -> None:
        """Another engine on the same cache; request ids begin anew."""
        self.end()
        self.asked, self.aborted, self.ended = {}, set(), {}
        self.start()

    def end(self) -> None:
        """Everything ends, once, and is given back."""
        self.cache.hold_transfers = self.cache.hold_lookups = False
        self.cache.finish_lookups()
        self.cache.finish_all()
        self.run_to_the_end()
        for request_id, (_, params) in self.asked.items():
            if request_id not in self.aborted:
                assert {index for one, index in self.ended if one == request_id} == set(range(params.n))
        assert self.engine.drain()
        self.engine.check_integrity()
        assert self.engine.stats()["idle_blocks"] == self.engine.stats()["pool_blocks"]
        assert not self.cache.leases, "a lease is left"
        self.running.close()
        assert self.cache.closed

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.end()
