"""Under what names a request's blocks are: of its images, its adapter, the weights that computed them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from scheduler_rig import SIZE, SPEC, Rig, adapter
from vllm_engines import PATIENCE_S

from tiercache.connectors.vllm.apart import MAX_THREADS
from tiercache.connectors.vllm.orders import WorkerReport
from tiercache.connectors.vllm.stores import EngineFacts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("number", [None, 1])
def test_images_have_names_in_one_engine_only_unless_ids_are_content(rig: Rig, number: int | None) -> None:
    """A user's id can look like a hash: vLLM makes it one where images have options."""

    def own(*ids: str, in_parts: bool = False) -> bool:
        images = [SimpleNamespace(mm_hash=name, identifier=f"adapter:{name}") for name in ids]
        request = rig.add(f"{ids}{in_parts}", 2, None if number is None else adapter(number, "fine"), images)
        request.resumable = in_parts
        rig.answer(request)
        lookup = rig.scheduler._requests[request.request_id].lookup
        assert lookup is not None
        return bool(lookup.root[1])

    rig.cache.go_on.set()
    hashed = "0123456789abcdef" * 4
    assert [own(), own(hashed), own(hashed, "cat.png"), own("cat.png")] == [False, True, True, True]
    assert own(in_parts=True), "a later part may have images"
    rig.scheduler._engine = EngineFacts([[SPEC]], 1, media_ids=True)
    assert not own("dog.png", hashed)
    assert not own("cat.png", in_parts=True)


def test_an_adapter_that_cannot_be_read_holds_up_its_own_requests_alone(rig: Rig) -> None:
    hanging = [rig.add(f"hangs {number}", 2, adapter(1, "hangs")) for number in range(20)]
    plain, other = rig.add("plain", 2), rig.add("other", 2, adapter(2, "fine"))
    rig.cache.go_on.set()
    rig.step()
    assert rig.answer(plain) == rig.answer(other) == 2 * SIZE
    assert rig.names.hangs.wait(PATIENCE_S)
    assert {rig.scheduler.matched_tokens(request, 0) for request in hanging} == {None}, "the deadline is far away"
    for request in hanging[1:]:
        lookup = rig.scheduler._requests[request.request_id].lookup
        assert lookup is not None
        lookup.until_s = 0.0
    assert [rig.scheduler.matched_tokens(request, 0) for request in hanging[1:]] == [0] * 19, "they are computed"
    rig.names.goes_on.set()
    assert rig.answer(hanging[0]) == 2 * SIZE, "its name came in time"
    rig.looked_up()
    assert len(rig.cache.found) == 3, "nothing is looked up for those that have gone on without"


def test_adapters_that_hang_are_no_more_than_so_many_threads(rig: Rig) -> None:
    names = [rig.add(f"{number}", 2, adapter(number, "hangs")) for number in range(MAX_THREADS + 2)]
    rig.cache.go_on.set()
    rig.step()
    assert [rig.answer(request) for request in names[MAX_THREADS:]] == [0, 0]
    assert rig.answer(rig.add("plain", 2)) == 2 * SIZE
    rig.names.goes_on.set()
    assert rig.answer(names[0]) == 2 * SIZE


def test_an_adapter_for_which_there_is_no_thread_is_read_when_there_is_one(
    rig: Rig, no_threads: pytest.MonkeyPatch
) -> None:
    rig.cache.go_on.set()
    assert rig.answer(rig.add("a", 2, adapter(1, "fine"))) == 0
    no_threads.undo()
    assert rig.answer(rig.add("b", 2, adapter(1, "fine"))) == 2 * SIZE


def test_names_are_given_anew_when_a_rank_says_that_its_weights_have_changed(rig: Rig) -> None:
    loading, waiting = rig.add("a", 2), rig.add("b", 3)
    rig.go_on()
    assert rig.scheduler.matched_tokens(loading, 0) == 2 * SIZE
    rig.load(loading, 2 * SIZE)
    rig.step()
    rig.scheduler.reported(WorkerReport(moves={1: 1}).aggregate(WorkerReport(moves={0: 2})))
    assert rig.names.epochs == 1
    orders = rig.step()
    assert (orders.moves, orders.renamed, orders.cancel) == ({0: 2, 1: 1}, True, ["a"])
    assert rig.scheduler.matched_tokens(waiting, 0) == 0
    rig.scheduler.reported(WorkerReport(moves={1: 1}))
    orders = rig.step()
    assert (orders.moves, orders.renamed, rig.names.epochs) == ({0: 2, 1: 1}, False, 1), "that was known"
    rig.scheduler.reported(WorkerReport(moves={1: 2}))
    assert rig.names.epochs == 2
    assert orders.moves == {0: 2, 1: 1}, "orders that were given do not change"
    rig.scheduler.loads_ended({"a"}, True)


def test_vllm_forgets_what_it_had_when_the_weights_changed(rig: Rig) -> None:
    """Until `reset_prefix_cache` it may store old blocks of its own under the names of the new weights."""
    rig.pool.cached_block_hash_to_block = {}
    assert not rig.step().renamed, "as for a benchmark"
    rig.scheduler.reported(WorkerReport(moves={0: 1}))
    assert rig.step().renamed
    rig.pool.cached_block_hash_to_block = {}
    assert rig.step().renamed
    assert rig.names.epochs == 2
    rig.pool.cached_block_hash_to_block = {}
    assert not rig.step().renamed, "vLLM has no older block any more"


def test_a_reset_while_vllm_keeps_its_own_cache_begins_anew_when_vllm_has_forgotten_it(rig: Rig) -> None:
    """As with requests that run: until then what vLLM had before may be stored under the new names."""
    rig.pool.cached_block_hash_to_block = {}
    rig.scheduler.reset()
    rig.step()
    rig.pool.cached_block_hash_to_block = {}
    assert not rig.step().renamed, "vLLM had no older block"
    rig.scheduler.reset()
    assert rig.step().renamed
    assert not rig.step().renamed
    rig.pool.cached_block_hash_to_block = {}
    assert rig.step().renamed
    assert rig.names.epochs == 3


def test_what_vllm_computes_after_a_failed_load_within_a_step_is_its_own(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that share its blocks go on, and what they compute is in vLLM's cache: others may begin with it."""
    rig.cache.found_blocks = 0
    loads, shares = rig.add("loads", 2), rig.add("shares", 2)
    rig.go_on()
    for request, local in ((loads, 0), (shares, SIZE)):
        assert rig.scheduler.matched_tokens(request, local) == 0
        rig.load(request, 0)
        request.num_computed_tokens = SIZE
    rig.step({"loads": SIZE + 1, "shares": SIZE + 1}, new=[loads, shares])
    rig.scheduler.lost({5})
    assert not rig.step().renamed, "one of requests that waited for it"
    rig.scheduler.matched_tokens(shares, 0)
    rig.load(shares, 0)
    rig.step({"shares": 1}, new=[shares])
    rig.scheduler.lost({0})
    shares.num_computed_tokens = 2 * SIZE + 1
    rig.scheduler.finished(shares)
    orders = rig.step()
    assert (orders.renamed, orders.ready, rig.names.epochs) == (True, [], 1)
    assert "a load of another connector failed" in caplog.text


def test_a_failed_load_of_our_own_begins_no_epoch_beside_a_sibling(rig: Rig) -> None:
    """Its blocks are those that a sibling has filled within a step that was the last one with tokens."""
    rig.cache.found_blocks = 0
    brought = rig.add("brought", 2)
    rig.go_on()
    assert rig.scheduler.matched_tokens(brought, 0) == 0
    rig.load(brought, 0)
    brought.num_computed_tokens = 2 * SIZE
    rig.step({"brought": 1}, new=[brought])
    rig.scheduler.finished(brought)
    rig.cache.found_blocks = 2
    ours = rig.add("ours", 2)
    rig.tables["ours"] = rig.tables["brought"]
    rig.looked_up()
    tokens = rig.scheduler.matched_tokens(ours, 0)
    assert tokens
    rig.load(ours, tokens)
    lost = {block.block_id for block in rig.tables["ours"]}
    rig.step()
    rig.scheduler.lost(lost)
    assert rig.names.epochs == 0
    rig.scheduler.loads_ended({"ours"}, True)
    rig.scheduler.lost(lost)
    assert rig.names.epochs == 1, "else this test would check nothing"
