"""The scheduler's half, with the worker's on a tiny vLLM, in any order of events; and what some requests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from machines import in_first_ring, in_stress
from tiny_vllm import SIZE, TinyCopy, TinyRequest, TinyVllm, adapter, step_output
from waiting import wait_until

import tiercache
from tiercache.connectors.vllm.compat import CacheHitSource, RequestStatus
from tiercache.connectors.vllm.costs import EngineCosts, TierBlocks
from tiercache.connectors.vllm.log import DECLINED, RequestLog
from tiercache.connectors.vllm.orders import WorkerReport
from tiercache.connectors.vllm.scheduler import MAX_THREADS, STORED_WAIT_S
from tiercache.protocol.messages import KEY_BYTES, Priority, unpack_indices

LOW = tiercache.Hint(ttl_s=3.5, priority=Priority.LOW)
PROMPTS = st.tuples(st.integers(0, 1), st.sampled_from([1, 4, 6, 7, 9, 11]), st.integers(0, 2))
MOSTLY = st.sampled_from([True, True, True, False])
"""Which beginning, how long it is, and what follows: many requests begin alike."""


class VllmMachine(RuleBasedStateMachine):
    """Requests come, go and are preempted while blocks are looked up, loaded, stored, lost and renamed.

    Every step checks that what it reads is right (`TinyVllm`). In the end all is released, and what is stored is found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vllm = TinyVllm(alone=True)
        self.count = 0
        for base in (0, 1):  # the cache knows both beginnings, and vLLM has none
            self.vllm.add(TinyRequest(f"first {base}", [base] * 11, 1))
            self.vllm.run_dry()
        self.vllm.reset_prefix_cache()

    def alive(self) -> list[TinyRequest]:
        return [*self.vllm.waiting, *self.vllm.running]

    def copying(self) -> list[TinyCopy]:
        return [copy for copy in self.vllm.rank.copies if not copy.over]

    @precondition(lambda self: len(self.alive()) < 6)
    @rule(prompt=PROMPTS, answer=st.integers(1, 6), quick=MOSTLY, reads=MOSTLY)
    def add(self, prompt: tuple[int, int, int], answer: int, quick: bool, reads: bool) -> None:
        base, length, rest = prompt
        one = TinyRequest(f"r{self.count}", [base] * length + [rest] * (rest * 2), answer)
        one.skip_reading_prefix_cache = not reads
        self.vllm.add(one)
        self.count += 1
        if quick:
            self.step(quick, 1)

    @precondition(lambda self: self.alive())
    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        alive = self.alive()
        self.vllm.abort(alive[which % len(alive)])

    @rule(quick=MOSTLY, steps=st.integers(1, 3))
    def step(self, quick: bool, steps: int) -> None:
        for _ in range(steps):
            if quick:
                self.vllm.lookups.finish()
            self.vllm.step()

    @rule()
    def evict(self) -> None:
        """As if other requests had been given vLLM's free blocks."""
        self.vllm.pool.evict()

    @precondition(lambda self: self.vllm.lookups)
    @rule(whole=st.booleans())
    def look_up(self, whole: bool) -> None:
        if whole:
            self.vllm.lookups.finish()
        self.vllm.lookups.work()

    @precondition(lambda self: self.copying())
    @rule(which=st.integers(0, 9), pieces=st.integers(1, 3))
    def copy(self, which: int, pieces: int) -> None:
        copying = self.copying()
        for _ in range(pieces):
            copying[which % len(copying)].work()

    @rule(available=MOSTLY, full=st.booleans(), hurry=st.booleans(), seconds=st.sampled_from([0.0, 0.1, 100.0]))
    def trouble(self, available: bool, full: bool, hurry: bool, seconds: float) -> None:
        cache = self.vllm.cache
        cache.available, cache.full, self.vllm.rank.hurry = available, full, hurry
        self.vllm.now_s += seconds

    @precondition(lambda self: self.vllm.cache.blocks)
    @rule(which=st.integers(0, 30), leased=st.booleans())
    def lose(self, which: int, leased: bool) -> None:
        """The daemon loses a block, and with `leased` those who are about to load it lose it too."""
        blocks = self.vllm.cache.blocks
        lost = blocks.pop(list(blocks)[which % len(blocks)])
        if leased:
            for match in self.vllm.cache.matches:
                match.contents = [[] if block is lost else block for block in match.contents]

    @rule(chance=st.integers(0, 15), announced=st.booleans())
    def update_weights(self, chance: int, announced: bool) -> None:
        """One that is announced may be too small for the ranks to see it."""
        if chance in (8, 9):
            self.vllm.update_weights(unseen=announced)
            if announced:
                self.reset(connector=True, weights_stay=False)

    @rule(connector=st.booleans(), weights_stay=st.booleans())
    def reset(self, connector: bool, weights_stay: bool) -> None:
        """vLLM resets the connector even where it cannot reset its own cache, as requests are running."""
        mixed = self.vllm.mixed
        done = self.vllm.reset_prefix_cache()
        if connector:
            self.vllm.reset_connector(weights_stay=weights_stay and done and not mixed)

    @invariant()
    def check(self) -> None:
        self.vllm.check()

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            self.vllm.close()

    def _end(self) -> None:
        vllm = self.vllm
        self.trouble(available=True, full=False, hurry=True, seconds=0.0)
        vllm.run_dry()
        vllm.check()
        assert len(vllm.pool.free) == len(vllm.cells)
        planner = vllm.planner
        assert not any((planner._requests, planner._loads, planner._leased, planner._asked, planner.stores._jobs))
        for loaded in (0, 0, 3):  # what is stored is found, as soon as vLLM has nothing of former weights
            assert vllm.reset_prefix_cache()
            vllm.step()
            before = vllm.loaded_blocks
            vllm.add(TinyRequest(f"last {len(vllm.cache.matches)}", [7, 8] * 3 + [9], 2))
            vllm.run_dry()
            assert vllm.loaded_blocks - before >= loaded
        assert all(match.released == bool(match.blocks) for match in vllm.cache.matches), "each once"


TestVllm = in_first_ring(VllmMachine, examples=200, steps=60)
TestVllmForLong = in_stress(VllmMachine)


@pytest.fixture
def vllm() -> Iterator[TinyVllm]:
    vllm = TinyVllm(costs=EngineCosts(SIZE, 1 << 10))
    yield vllm
    vllm.names.goes_on.set()
    vllm.close()


def request(name: str, blocks: int, rest: int = 1) -> Any:
    """A request of so many blocks and `rest` tokens; all requests begin alike."""
    return TinyRequest(name, range(blocks * SIZE + rest), 1)


def store(vllm: TinyVllm, blocks: int) -> None:
    """Have the cache know so many blocks."""
    vllm.add(request("stored", blocks))
    vllm.run_dry()
    vllm.reset_prefix_cache()
    assert len(vllm.cache.blocks) >= blocks


def ask(vllm: TinyVllm, one: Any, local: int = 0) -> int | None:
    """Add a request, and tell what vLLM is told after its lookup."""
    vllm.planner.add(one)
    vllm.lookups.finish()
    return vllm.planner.matched_tokens(one, local)


def give_blocks(vllm: TinyVllm, one: Any, tokens: int) -> None:
    blocks = vllm.pool.take(one.num_tokens // SIZE) or []
    vllm.tables[one.request_id] = blocks
    vllm.planner.allocated(one, SimpleNamespace(blocks=[blocks]), tokens)


def orders_of(vllm: TinyVllm, tokens: dict[str, int] | None = None, new: tuple[Any, ...] = ()) -> Any:
    """The orders of a step with `tokens` of each request, of which some are `new`."""
    started = [(one.request_id, one.num_computed_tokens, ()) for one in new]
    orders = vllm.planner.step(step_output(tokens or {}, started))
    vllm.planner.check_integrity()
    return orders


# --- lookups


def test_a_request_waits_for_the_load_of_another_with_its_beginning(vllm: TinyVllm) -> None:
    store(vllm, 2)
    copies = len(vllm.rank.copies)
    vllm.add(request("a", 2))
    vllm.add(request("b", 3))
    vllm.lookups.finish()
    vllm.step()
    assert len(vllm.rank.copies) == copies + 1
    before = vllm.loaded_blocks
    vllm.run_dry()
    assert vllm.loaded_blocks - before == 2, "each block once"


@pytest.mark.parametrize("broken", ["media", "name", "answer"])
def test_a_lookup_that_fails_in_whatever_way_is_a_miss(vllm: TinyVllm, broken: str) -> None:
    store(vllm, 2)
    one = request("a", 2)
    names, cache = vllm.names.root, vllm.cache.match
    if broken == "media":
        del one.mm_features
    elif broken == "name":
        vllm.names.root = None
    else:
        vllm.cache.match = None  # type: ignore[assignment, method-assign]
    vllm.planner.add(one)
    with suppress(AttributeError, TypeError):  # which the queue logs
        vllm.lookups.finish()
    assert vllm.planner.matched_tokens(one, 0) == 0
    vllm.names.root, vllm.cache.match = names, cache  # type: ignore[method-assign]
    assert ask(vllm, request("b", 2)) == 2 * SIZE


def test_a_load_that_vllm_defers_fails_if_the_request_is_forgotten_by_then(vllm: TinyVllm) -> None:
    """vLLM may tell of blocks steps after it asked, and then waits for their load."""
    store(vllm, 3)
    one = request("deferred", 3)
    assert ask(vllm, one) == 3 * SIZE
    vllm.planner.reset()
    orders_of(vllm)
    give_blocks(vllm, one, 3 * SIZE)
    orders = orders_of(vllm)
    assert [(load.request_id, len(load.runs[0].block_ids)) for load in orders.loads] == [("deferred", 3)]
    assert orders.cancel == ["deferred"]
    vllm.planner.loads_ended({"deferred"}, {"deferred"})
    vllm.planner.finished(one)
    assert orders_of(vllm).cancel == []
    vllm.lookups.finish()
    assert [match.released for match in vllm.cache.matches if match.blocks] == [1]


def test_a_block_is_stored_when_it_has_a_hash(vllm: TinyVllm) -> None:
    """Hashes that look ahead come with the tokens after their blocks."""
    one = request("looks ahead", 4)
    hashes, one.block_hashes = one.block_hashes, one.block_hashes[:3]
    assert ask(vllm, one) == 0
    give_blocks(vllm, one, 0)
    (store,) = orders_of(vllm, {"looks ahead": 4 * SIZE + 1}, (one,)).fresh
    assert [len(run.block_ids) for run in store.runs] == [3]
    one.num_computed_tokens, one.block_hashes, one.status = 4 * SIZE + 1, hashes, RequestStatus.FINISHED_STOPPED
    vllm.planner.finished(one)
    (store,) = orders_of(vllm).ready
    assert [len(run.block_ids) for run in store.runs] == [1]


@pytest.mark.parametrize("how", ["FINISHED_STOPPED", "FINISHED_ABORTED"])
def test_a_request_that_may_not_load_is_stored_at_its_end_though_vllm_did_not_wait(vllm: TinyVllm, how: str) -> None:
    """As one that asks for prompt logprobs: vLLM computes all of it at once, whatever it is told."""
    one = request("logprobs", 3)
    one.skip_reading_prefix_cache = True
    vllm.planner.add(one)
    assert vllm.planner.matched_tokens(one, 0) is None
    give_blocks(vllm, one, 0)
    assert not orders_of(vllm, {"logprobs": 3 * SIZE + 1}, (one,)).fresh
    vllm.lookups.finish()
    assert not vllm.cache.matches[-1].blocks
    one.num_computed_tokens, one.status = 3 * SIZE + 1, RequestStatus[how]
    vllm.planner.finished(one)
    stored = [len(run.block_ids) for store in orders_of(vllm).ready for run in store.runs]
    assert stored == ([3] if how == "FINISHED_STOPPED" else [])


def test_weights_that_are_exchanged_for_one_step_are_noticed(vllm: TinyVllm) -> None:
    """As for a score by other weights: they are back before a rank would look at its next store."""
    store(vllm, 2)
    vllm.weights.version = 1
    vllm.add(TinyRequest("meanwhile", [9] * (2 * SIZE + 1), 1))
    vllm.lookups.finish()
    vllm.step()
    assert not vllm.running
    vllm.weights.version = 0
    assert vllm.reset_prefix_cache()
    vllm.run_dry()
    assert {cell.newest for cells in vllm.cache.blocks.values() for cell in cells} == {0}


# --- what a load costs


def prefill_takes(vllm: TinyVllm, seconds_per_block: float) -> None:
    costs = vllm.planner.costs
    assert costs is not None
    for step in range(4):
        costs.stepped({"long": 100 * SIZE}, 100 * SIZE, step * 100 * seconds_per_block)


@pytest.mark.parametrize(
    ("slow", "loaded", "sources"),
    [
        (TierBlocks(0, 1), 3, {CacheHitSource.HOST: 3}),
        (TierBlocks(0, 0, 1), 4, {CacheHitSource.HOST: 3, CacheHitSource.DISK: 1}),
        (None, 5, {CacheHitSource.HOST: 3, CacheHitSource.DISK: 1, CacheHitSource.EXTERNAL_UNSPECIFIED: 1}),
    ],
)
def test_what_a_slow_tier_has_of_a_match_is_computed_and_the_rest_loaded(
    vllm: TinyVllm, slow: TierBlocks | None, loaded: int, sources: dict[CacheHitSource, int]
) -> None:
    store(vllm, 5)
    prefill_takes(vllm, 1.0)
    for _ in range(3 if slow else 0):
        vllm.planner.costs.loaded(slow, 3.0)  # type: ignore[union-attr, arg-type]
    vllm.cache.below_blocks, vllm.cache.shared_blocks = 2, 1
    one = request("a", 5)
    assert [ask(vllm, one), vllm.planner.matched_tokens(one, 0)] == [loaded * SIZE] * 2
    assert vllm.planner.counters() == ({DECLINED: 5 - loaded} if slow else {})
    assert vllm.planner.counters() == {}
    assert vllm.planner.hit_sources(one, loaded * SIZE) == {tier: count * SIZE for tier, count in sources.items()}
    give_blocks(vllm, one, loaded * SIZE)
    (load,) = orders_of(vllm).loads
    assert [len(run.block_ids) for run in load.runs] == [loaded]


def test_the_slowest_rank_is_what_a_load_has_taken(vllm: TinyVllm) -> None:
    store(vllm, 2)
    prefill_takes(vllm, 1.0)
    for number, loaded in enumerate((2, 2, 0)):  # the first may have been a bad moment
        one = request(f"{number}", 2)
        assert ask(vllm, one) == loaded * SIZE
        if loaded:
            give_blocks(vllm, one, 2 * SIZE)
            slow = WorkerReport(load_seconds={one.request_id: 60.0})
            vllm.planner.reported(slow.aggregate(WorkerReport(load_seconds={"gone": 9.0})))
            vllm.planner.reported(WorkerReport(load_seconds={one.request_id: 0.1}))
            vllm.planner.loads_ended({one.request_id}, set())
            vllm.pool.give_back(vllm.tables.pop(one.request_id))


def test_a_load_that_falls_short_at_one_rank_has_failed_when_the_last_rank_ends_it(
    vllm: TinyVllm, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM tells of bad blocks at once, and of the end when all ranks are done. Another load may end with that."""
    caplog.set_level("INFO")
    vllm.planner._log = RequestLog("all")
    vllm.add(TinyRequest("other", [9] * (2 * SIZE + 1), 1))
    store(vllm, 3)
    short, whole = request("short", 3), TinyRequest("whole", [9] * (2 * SIZE + 1), 1)
    for one, tokens in ((short, 3 * SIZE), (whole, 2 * SIZE)):
        assert ask(vllm, one) == tokens
        give_blocks(vllm, one, tokens)
    orders_of(vllm)
    vllm.planner.lost({vllm.tables["short"][1].block_id})
    orders_of(vllm)
    vllm.planner.loads_ended({"short", "whole"}, set())
    short.num_computed_tokens, whole.num_computed_tokens = SIZE, 2 * SIZE
    (again,) = orders_of(vllm, {"short": 2 * SIZE + 1, "whole": 1}, (short, whole)).fresh
    assert [run.block_ids for run in again.runs] == [[block.block_id for block in vllm.tables["short"]]]
    assert "short: not all came" in caplog.text
    assert "whole: 4 of 5 prompt tokens" in caplog.text


# --- what a request says


@pytest.mark.parametrize(
    ("parameters", "hint", "answer"),
    [
        ({"tiercache": {"return_in_s": 40}, "other": 1}, tiercache.Hint(return_in_s=40.0), 4),
        (
            {"tiercache": {"priority": "low", "ttl_s": 3.5, "stored": 2}},
            LOW,
            4,
        ),
        ({"tiercache": {}}, None, 4),
        ({"tiercache": {"ttl_s": float("nan")}}, None, 4),
        ({"tiercache": {"stored": "8"}}, None, 4),
        ({"do_remote_decode": True}, None, 4),
        ({"other": 1}, None, None),
        (["tiercache"], None, None),
        (None, None, None),
    ],
)
def test_a_hint_goes_with_the_next_step_and_the_answer_says_what_is_stored(
    vllm: TinyVllm, parameters: Any, hint: tiercache.Hint | None, answer: int | None
) -> None:
    one = request("a", 2)
    one.kv_transfer_params = parameters
    ask(vllm, one)
    vllm.now_s += 2 * STORED_WAIT_S
    vllm.planner.matched_tokens(one, 0)
    give_blocks(vllm, one, 0)
    orders_of(vllm, {"a": 2 * SIZE + 1}, (one,))
    one.num_computed_tokens = 2 * SIZE + 1
    assert vllm.planner.finished(one) == (answer and {"tiercache": {"stored": answer}})
    hints = orders_of(vllm).hints
    assert [(len(each.keys), each.hint) for each in hints] == ([(2 * KEY_BYTES, hint)] if hint else [])
    assert not orders_of(vllm).hints


def test_a_request_waits_for_what_another_engine_is_storing_and_asks_less_and_less_often(vllm: TinyVllm) -> None:
    store(vllm, 1)
    one = request("a", 3)
    one.kv_transfer_params = {"tiercache": {"stored": 3 * SIZE}}
    assert ask(vllm, one) is None
    asked_ms, begin_s = [], vllm.now_s
    for ms in range(300):
        vllm.now_s, before = begin_s + ms / 1000, len(vllm.cache.matches)
        assert vllm.planner.matched_tokens(one, 0) is None
        vllm.lookups.finish()
        asked_ms += [ms] * (len(vllm.cache.matches) - before)
    assert asked_ms[0] < 10
    assert len(asked_ms) < 10
    assert 40 < asked_ms[-1] - asked_ms[-2] < 60
    vllm.now_s = begin_s + STORED_WAIT_S + 0.1
    assert vllm.planner.matched_tokens(one, 0) == SIZE, "it waits no longer"


@pytest.mark.parametrize(("local", "answer"), [(1, None), (2, 0)])
def test_a_request_does_not_wait_for_what_vllm_has_itself(vllm: TinyVllm, local: int, answer: int | None) -> None:
    """vLLM has no more of a prompt itself than what is before the last token."""
    one = request("a", 3, rest=0)
    one.kv_transfer_params = {"tiercache": {"stored": 3 * SIZE}}
    assert ask(vllm, one, local * SIZE) == answer


# --- names


def test_images_have_names_in_one_engine_only_unless_ids_are_content() -> None:
    """A user's id can look like a hash: vLLM makes it one where images have options."""
    for promised in (False, True):
        vllm = TinyVllm(media_ids=promised)

        def own(*ids: str, in_parts: bool = False, vllm: TinyVllm = vllm) -> bool:
            one = request(f"{ids}{in_parts}", 2)
            one.mm_features = [SimpleNamespace(mm_hash=name) for name in ids]
            one.resumable = in_parts
            ask(vllm, one)
            lookup = vllm.planner._requests[one.request_id].lookup
            assert lookup is not None
            return bool(lookup.root[1])

        assert not own()
        assert [own("cat.png"), own("0123456789abcdef" * 4, "cat.png"), own(in_parts=True)] == [not promised] * 3
        vllm.close()


def answer(vllm: TinyVllm, one: Any) -> int:
    """What vLLM is told in the end, as it asks again and again; adapters are read in threads."""
    told: list[int] = []

    def asked() -> bool:
        vllm.lookups.finish()
        tokens = vllm.planner.matched_tokens(one, 0)
        told.extend([] if tokens is None else [tokens])
        return bool(told)

    wait_until(asked)
    return told[0]


def add_adapted(vllm: TinyVllm, name: str, number: int, path: str) -> Any:
    one = request(name, 2)
    one.lora_request = adapter(number, path)
    vllm.planner.add(one)
    return one


def test_an_adapter_that_cannot_be_read_holds_up_its_own_requests_alone(vllm: TinyVllm) -> None:
    store(vllm, 2)
    hanging = [add_adapted(vllm, f"hangs {number}", 1, "hangs") for number in range(20)]
    plain, other = request("plain", 2), add_adapted(vllm, "other", 2, "fine")
    vllm.planner.add(plain)
    assert answer(vllm, plain) == answer(vllm, other) == 2 * SIZE
    assert vllm.names.hangs.wait(60)
    assert {vllm.planner.matched_tokens(one, 0) for one in hanging} == {None}, "the deadline is far away"
    vllm.now_s += 100
    assert [vllm.planner.matched_tokens(one, 0) for one in hanging] == [0] * 20, "they are computed"
    before = len(vllm.cache.matches)
    vllm.names.goes_on.set()
    assert answer(vllm, add_adapted(vllm, "now", 1, "hangs")) == 2 * SIZE
    assert len(vllm.cache.matches) == before + 1, "nothing is looked up for those that have gone on without"


def test_adapters_that_hang_are_no_more_than_so_many_threads(vllm: TinyVllm) -> None:
    store(vllm, 2)
    names = [add_adapted(vllm, f"{number}", number, "hangs") for number in range(MAX_THREADS + 2)]
    assert [answer(vllm, one) for one in names[MAX_THREADS:]] == [0, 0]
    assert ask(vllm, request("plain", 2)) == 2 * SIZE
    vllm.names.goes_on.set()
    assert answer(vllm, names[0]) == 2 * SIZE


@pytest.mark.parametrize("wanted", [True, False])
def test_blocks_of_a_shared_store_are_named_to_a_daemon_that_publishes_events(vllm: TinyVllm, wanted: bool) -> None:
    """A store names them; the daemon has them, so that nothing is copied. Without events there is nothing to name."""
    store(vllm, 6)
    one = request("a", 6)
    one.all_token_ids, one.cache_salt, one.prompt_embeds = one.tokens, None, None
    vllm.cache.below_blocks, vllm.cache.shared_blocks, vllm.cache.wants_events = 4, 2, wanted
    assert ask(vllm, one) == 6 * SIZE
    give_blocks(vllm, one, 6 * SIZE)
    orders_of(vllm)
    vllm.planner.loads_ended({"a"}, set())
    one.num_computed_tokens = 6 * SIZE
    stores = orders_of(vllm, {"a": 1}, (one,)).fresh
    assert len(stores) == wanted
    for each in stores:
        assert [len(run.block_ids) for run in each.runs] == [2]
        assert len(each.events.hashes) == 2
        assert unpack_indices(each.events.tokens).tolist() == one.tokens[4 * SIZE : 6 * SIZE]


# --- beside other connectors


@pytest.mark.parametrize("how", ["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_ERROR"])
def test_what_a_sibling_loads_in_a_step_is_stored_only_if_the_end_says_that_it_has_come(
    vllm: TinyVllm, how: str
) -> None:
    one = request("a", 2)
    assert ask(vllm, one) == 0
    give_blocks(vllm, one, 0)
    one.num_computed_tokens = SIZE
    assert not orders_of(vllm, {"a": SIZE + 1}, (one,)).fresh
    one.num_computed_tokens, one.status = 2 * SIZE + 1, RequestStatus[how]
    vllm.planner.finished(one)
    assert len(orders_of(vllm).ready) == (how in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"))


def test_what_vllm_computes_after_a_failed_load_within_a_step_is_its_own(
    vllm: TinyVllm, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that share its blocks go on, and what they compute is in vLLM's cache: others may begin with it."""
    loads = request("loads", 2)
    assert ask(vllm, loads) == 0
    give_blocks(vllm, loads, 0)
    loads.num_computed_tokens = SIZE
    orders_of(vllm, {"loads": SIZE + 1}, (loads,))
    brought = vllm.tables["loads"][0].block_id
    vllm.planner.lost({brought + 5})
    assert not orders_of(vllm).renamed, "one of requests that waited for it"
    vllm.planner.lost({brought})
    loads.num_computed_tokens = 2 * SIZE + 1
    vllm.planner.finished(loads)
    orders = orders_of(vllm)
    assert (orders.renamed, orders.ready, vllm.names.epoch) == (True, [], 1)
    assert "a load of another connector failed" in caplog.text


def test_a_failed_load_of_our_own_begins_no_epoch_beside_a_sibling(vllm: TinyVllm) -> None:
    """Its blocks are those that a sibling has filled within a step that was the last one with tokens."""
    store(vllm, 2)
    brought = TinyRequest("brought", [9] * (2 * SIZE + 1), 1)
    assert ask(vllm, brought) == 0
    give_blocks(vllm, brought, 0)
    brought.num_computed_tokens = 2 * SIZE
    orders_of(vllm, {"brought": 1}, (brought,))
    vllm.planner.finished(brought)
    ours = request("ours", 2)
    assert ask(vllm, ours) == 2 * SIZE
    vllm.planner.allocated(ours, SimpleNamespace(blocks=[vllm.tables["brought"]]), 2 * SIZE)
    lost = {block.block_id for block in vllm.tables["brought"]}
    orders_of(vllm)
    epoch = vllm.names.epoch
    vllm.planner.lost(lost)
    assert vllm.names.epoch == epoch
    vllm.planner.loads_ended({"ours"}, set())
    vllm.planner.lost(lost)
    assert vllm.names.epoch == epoch + 1, "else this test would check nothing"
