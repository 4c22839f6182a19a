"""Whatever the cache does, SGLang goes on, and what it finds is what was computed."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.managers import cache_controller
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.utils.weight_checker import WeightChecker
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix
from sglang_rig import MAMBA, Engine, Rig, save_model
from waiting import wait_until

import tiercache
from tiercache.connector.connector import Connector
from tiercache.errors import VersionError


def same(rig: Rig, one: Engine, other: Engine, tokens: list[int]) -> bool:
    pairs = zip(rig.contents(one, tokens), rig.contents(other, tokens), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def stored_by(rig: Rig, pages: int = 8, **options: Any) -> tuple[Engine, list[int]]:
    """An engine that has stored so many pages."""
    engine, tokens = rig.engine(**options), rig.tokens(pages)
    rig.compute(engine, tokens)
    rig.store(engine, tokens)
    return engine, tokens


# --- weights and names --------------------------------------------------------------------------


def test_other_weights_under_the_same_name_find_nothing(rig: Rig, tmp_path: Path) -> None:
    _, tokens = stored_by(rig)
    for place, seed, found in (("other", 1, 0), ("same", 0, len(tokens))):
        (tmp_path / place).mkdir()
        model = save_model(tmp_path / place / rig.model.name, seed=seed)
        assert rig.prefetch(rig.engine(model=model), tokens) == found


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"kv_cache_dtype": "fp8_e5m2"}},
        {"arguments": {"context_length": 2048}},
        {"arguments": {"speculative_draft_load_format": "safetensors"}},
        {"arguments": {"json_model_override_args": '{"rope_theta": 5.0}'}},
        {"salt": "a secret"},
        {"tenant": "team"},
        {"model_id": "another"},
        {"layout": "layer_first"},
    ],
    ids=lambda change: str(*change),
)
def test_what_changes_pages_changes_their_names(rig: Rig, change: dict[str, Any]) -> None:
    first, tokens = stored_by(rig)
    assert rig.prefetch(rig.engine(**change), tokens) == 0
    second = rig.engine()
    assert rig.prefetch(second, tokens) == len(tokens)
    assert same(rig, first, second, tokens)


def forget(engine: Engine) -> None:
    """What SGLang's scheduler does to flush its cache."""
    engine.tree.reset()
    engine.requests.clear()
    engine.allocator.clear()


def update_weights() -> None:
    """As a trainer does. It fails here, without a model, but has begun by then."""
    with pytest.raises(AttributeError):
        WeightUpdater.update_weights_from_tensor(object(), named_tensors=[])


def test_an_update_of_weights_renames_pages_of_this_engine_only(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    engine, tokens = stored_by(rig)
    with caplog.at_level(logging.INFO, "tiercache.connectors.sglang"):
        update_weights()
        update_weights()
    assert caplog.text.count("the weights change: nothing is found or stored until") == 1
    assert rig.prefetch(engine, rig.tokens(8, start=9)) == 0
    later = rig.tokens(4, start=3000)
    rig.compute(engine, later, seed=3)
    node_of_mixed_weights = engine.backend.batch_set_v1(["00" * 32], torch.arange(16), None)
    assert node_of_mixed_weights == [False]

    forget(engine)
    assert rig.prefetch(engine, tokens) == 0, "pages of the old weights"
    rig.compute(engine, tokens, seed=4)
    rig.store(engine, tokens)
    wanted = rig.contents(engine, tokens)
    forget(engine)
    assert rig.prefetch(engine, tokens) == len(tokens), "pages of the new ones, after a plain flush"
    assert all(torch.equal(*pair) for pair in zip(wanted, rig.contents(engine, tokens), strict=True))

    other = rig.engine()
    assert rig.prefetch(other, tokens) == len(tokens), "the original weights keep theirs"
    assert not any(torch.equal(*pair) for pair in zip(wanted, rig.contents(other, tokens), strict=True))


def test_what_is_computed_within_an_update_session_is_not_found_after_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("restore_weights_before_loading", "postprocess_weights"):
        monkeypatch.setattr(DefaultModelLoader, name, lambda *_: None)
    engine, tokens = stored_by(rig)
    weights = SimpleNamespace(get_model=lambda: None, device="cpu")
    WeightUpdater.begin_weight_update(weights)
    for step in range(2):
        update_weights()
        forget(engine)
        rig.compute(engine, tokens, seed=5 + step)  # while some weights are old, or not processed yet
        rig.store(engine, tokens)
    WeightUpdater.end_weight_update(weights, run_post_load=False)
    forget(engine)
    assert rig.prefetch(engine, tokens) == 0

    rig.compute(engine, tokens, seed=7)
    rig.store(engine, tokens)
    wanted = rig.contents(engine, tokens)
    forget(engine)
    assert rig.prefetch(engine, tokens) == len(tokens), "the final weights have names"
    assert all(torch.equal(*pair) for pair in zip(wanted, rig.contents(engine, tokens), strict=True))


def reset_weights() -> None:
    WeightChecker._reset_tensors(SimpleNamespace(_model_state=lambda: ()))


def release_weights() -> None:
    weight_updater._export_static_state(SimpleNamespace(named_buffers=lambda: ()))


@pytest.mark.parametrize(
    ("lose", "arguments", "lost"),
    [
        (reset_weights, {}, True),
        (release_weights, {"enable_memory_saver": True}, True),
        (release_weights, {"enable_memory_saver": True, "enable_weights_cpu_backup": True}, False),
        (release_weights, {}, False),
    ],
    ids=["random numbers", "released", "released with a backup", "nothing is released"],
)
def test_pages_of_lost_weights_have_no_names(
    rig: Rig, lose: Callable[[], None], arguments: dict[str, Any], lost: bool
) -> None:
    engine = rig.engine(arguments=arguments)
    lose()
    tokens = rig.tokens(4)
    rig.compute(engine, tokens)
    rig.store(engine, tokens)
    assert rig.prefetch(rig.engine(arguments=arguments), tokens) == (0 if lost else len(tokens))


def test_longrope_beyond_its_original_length_is_not_served(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = [1.0] * 16
    rope = {"rope_type": "longrope", "short_factor": half, "long_factor": half, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 1024
    model = save_model(tmp_path / "longrope", rope_scaling=rope, original_max_position_embeddings=1024)
    rig.engine(model=model, named=False).backend.names.wait(60)
    assert "set --context-length to 1024 or less" in caplog.text
    assert rig.engine(model=model, arguments={"context_length": 1024}, named=False).backend.names.wait(60)


@pytest.mark.parametrize(
    ("argument", "settings", "named"),
    [
        ({"load_format": "rdma"}, {}, False),
        ({"load_format": "rdma"}, {"model_id": "step 100"}, True),
        ({"speculative_draft_load_format": "rdma"}, {}, False),
    ],
)
def test_weights_from_elsewhere_need_a_model_id(
    rig: Rig, caplog: pytest.LogCaptureFixture, argument: dict[str, Any], settings: dict[str, Any], named: bool
) -> None:
    engine = rig.engine(arguments=argument, named=False, **settings)
    assert engine.backend.names.wait(60) == named
    line = f"with {next(iter(argument))} rdma the weights may be others than in its files: set model_id"
    assert (line in caplog.text) != named


# --- faults -------------------------------------------------------------------------------------


def test_injected_failures_cost_hits_only(rig: Rig) -> None:
    """SGLang fails three of ten calls. What comes is whole: the state is at the end only."""
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):
        first, second = rig.engine(MAMBA), rig.engine(MAMBA)
        lengths: list[int] = []
        for number in range(100):
            tokens = rig.tokens(2, MAMBA, start=1000 * number)
            rig.compute(first, tokens, seed=number)
            rig.store(first, tokens)
            lengths.append(rig.prefetch(second, tokens))
            assert lengths[-1] in (0, len(tokens))
            if lengths[-1]:
                assert same(rig, first, second, tokens)
            if {0, len(tokens)} <= {*lengths}:
                break
        assert any(lengths)


@pytest.fixture
def mortal(model: Path, tmp_path: Path) -> Callable[[], tiercache.LaunchedDaemon]:
    """Starts a daemon, and another one in its place."""
    return lambda: tiercache.launch("64MiB", region="32MiB", run_dir=tmp_path / "d")


def test_a_daemon_that_dies_within_a_load_is_a_miss_and_its_successor_serves(
    model: Path, mortal: Callable[[], tiercache.LaunchedDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    with mortal() as daemon, Rig(model, daemon.address) as rig:
        first, tokens = stored_by(rig)
        second = rig.engine()
        load = Connector.load

        def die_first(*arguments: Any, **options: Any) -> int:
            daemon.kill()
            return load(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Connector, "load", die_first)
            assert rig.prefetch(second, tokens) == 0
        assert rig.prefetch(second, tokens) == 0, "there is none"
        with mortal():
            for engine in (first, second):
                wait_until(lambda engine=engine: engine.backend.connector.available)
            later = rig.tokens(4, start=2000)
            rig.compute(first, later, seed=2)
            rig.store(first, later)
            assert rig.prefetch(second, later) == len(later)
            assert same(rig, first, second, later)


def test_a_flush_waits_for_one_batch_of_a_slow_daemon_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig.engine()
    tokens = rig.tokens(8)
    rig.compute(engine, tokens)
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", 1)
    begun, batches, store = threading.Event(), [], Connector.store

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        batches.append(engine.controller.storage_stop_event.wait(60))
        return store(*arguments, **options)

    monkeypatch.setattr(Connector, "store", slow)
    node = match_prefix(engine.tree, tokens).last_device_node
    rig.kit._backup_node(engine.tree, node)
    rig.kit._write_path_to_l3(engine.tree, node)
    assert begun.wait(60)
    forget(engine)
    assert batches == [True]


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"interface_v1": 0}, 'no "interface_v1": 1'),
        ({"adress": "x"}, "has no 'adress': did you mean 'address'?"),
        ({"load_timeout_s": "long"}, "load_timeout_s"),
        ({"load_timeout_s": 30}, "load_timeout_s is 30: set more than 0 and at most 8"),
        ({"request_timeout_s": -1}, "request_timeout_s is -1: set more than 0"),
    ],
)
def test_wrong_settings_are_one_line_and_sglang_goes_on(
    rig: Rig, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], line: str
) -> None:
    with caplog.at_level(logging.ERROR):
        engine = rig.engine(**settings)
    assert line in caplog.text
    tokens = rig.tokens(2)
    rig.compute(engine, tokens)
    rig.store(engine, tokens)
    assert rig.prefetch(engine, rig.tokens(2, start=100)) == 0


def test_a_version_that_lacks_what_the_connector_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.unified_radix_cache", None)
    for name in ("sglang.engine", "sglang_hicache"):
        monkeypatch.delitem(sys.modules, f"tiercache.connectors.{name}")
    with pytest.raises(ImportError, match="unified_radix_cache"):  # of a version that is served: not its fault
        importlib.import_module("tiercache.connectors.sglang_hicache")
    monkeypatch.setattr("tiercache.connectors.sglang.version.SERVED", ("0.4.0",))
    with pytest.raises(VersionError, match=r"serves sglang 0\.4\.0, and this is 0\.5\.23: install"):
        importlib.import_module("tiercache.connectors.sglang_hicache")
