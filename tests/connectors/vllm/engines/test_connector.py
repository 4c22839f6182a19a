"""vLLM with the connector against vLLM without: the same tokens, from fewer computed ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm_engines import BLOCK, Engine, launch, prompt, save_model, save_window_model, stored_blocks, wait_until

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]


def test_what_was_stored_is_a_hit_with_the_same_tokens(
    engine: Engine, plain: Engine, daemon: tiercache.LaunchedDaemon
) -> None:
    long = prompt(1000, "hit")
    [expected], _ = plain.generate([long], 40)
    assert engine.generate([long], 40) == ([expected], [0])
    wait_until(lambda: stored_blocks(daemon) == (1000 + 39) // BLOCK)
    assert engine.regenerate([long], 40) == ([expected], [992])
    whole = long[:960]
    assert engine.regenerate([whole], 8)[1] == [960]  # loaded in full: only the last token is computed
    assert engine.regenerate([whole], 8)[0] == plain.generate([whole], 8)[0]
    assert engine.ask("check")["idle"]


AHEAD = """
import contextlib, torch
from unittest import mock
from vllm.platforms.cpu import CpuPlatform as platform
def ahead(kind, vllm_config, check=platform.check_and_update_config.__func__):
    check(kind, vllm_config)
    vllm_config.scheduler_config.async_scheduling = True
platform.check_and_update_config = classmethod(ahead)
torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = mock.MagicMock()
torch.cuda.stream = lambda stream, nothing=contextlib.nullcontext: nothing()
"""
"""vLLM schedules ahead on every platform but a CPU, where there is no device to wait for."""


def test_steps_that_are_scheduled_ahead(start: Start, plain: Engine, daemon: tiercache.LaunchedDaemon) -> None:
    """As on a GPU, vLLM schedules a step before it knows the tokens of the one before."""
    prompts = [prompt(700, f"ahead {number}") for number in range(3)]
    engine = start(daemon.address, async_scheduling=True, patch=AHEAD)
    assert engine.ask("check")["steps"] == 2
    expected = plain.generate(prompts, 40)[0]
    assert engine.generate(prompts, 40) == (expected, [0] * 3)
    turns = [ids + answer for ids, answer in zip(prompts, expected, strict=True)]
    wait_until(lambda: engine.regenerate(turns, 1)[1] == [(700 + 39) // BLOCK * BLOCK] * 3)
    assert engine.regenerate(prompts, 40) == (expected, [672] * 3)
    assert engine.ask("check")["idle"]


def test_a_sliding_window_is_matched_by_its_end(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = save_window_model(tmp_path_factory.mktemp("window"))
    long = prompt(1000, "window")
    disk = {"nvme": str(tmp_path_factory.mktemp("disk")), "nvme_size": "64MiB", "nvme_segment": "16MiB"}
    with launch("64MiB", region="16MiB", **disk) as own:
        expected = start(model=model).generate([long, long[:500]], 40)[0]
        engine = start(own.address, model=model)
        assert engine.generate([long], 40)[0] == expected[:1]
        wait_until(lambda: stored_blocks(own) >= 2 * 31)
        assert engine.regenerate([long], 40) == (expected[:1], [992])
        assert engine.regenerate([long[:500]], 40) == (expected[1:], [480])
        # From NVMe alone: the blocks without a window, and the last ones of that with one.
        with tiercache.Client.connect(own.address, map_arena=False) as client:
            wait_until(lambda: client.stats()["tiers"]["nvme"]["blocks"] == stored_blocks(own))
            client.flush(tier="dram")
            assert engine.regenerate([long], 40) == (expected[:1], [992])
            assert 31 < client.stats()["tiers"]["nvme"]["promoted_blocks"] < 2 * 31
            client.flush(tier="dram")
            assert engine.regenerate([long[:500]], 40) == (expected[1:], [480])
        engine.close()


def test_other_weights_under_the_same_name_are_another_model(
    start: Start, tmp_path_factory: pytest.TempPathFactory, daemon: tiercache.LaunchedDaemon
) -> None:
    folder = tmp_path_factory.mktemp("renamed")
    long = prompt(320, "weights")
    first = start(daemon.address, model=save_model(folder, seed=1))
    before = first.generate([long])[0]
    wait_until(lambda: first.ask("check")["idle"])
    second = start(daemon.address, model=save_model(folder, seed=2))
    after, cached = second.generate([long])
    assert (after != before, cached) == (True, [0])


def test_a_tenant_has_blocks_of_its_own_and_a_quota(
    engine: Engine, plain: Engine, start: Start, daemon: tiercache.LaunchedDaemon
) -> None:
    long, more = prompt(640, "tenant"), prompt(640, "more of a tenant")
    expected = plain.generate([long, more])[0]
    assert engine.generate([long])[0] == expected[:1]
    wait_until(lambda: stored_blocks(daemon) == 20)
    tenant = start(daemon.address, settings={"tenant": "team"})
    assert tenant.generate([long]) == (expected[:1], [0]), "blocks of other tenants are not found"
    wait_until(lambda: stored_blocks(daemon) == 40)
    assert tenant.regenerate([long]) == (expected[:1], [640])
    assert tenant.generate([more]) == (expected[1:], [0])
    wait_until(lambda: tenant.regenerate([more]) == (expected[1:], [640]))  # in the place of what it had before
    assert stored_blocks(daemon) <= 20 + 32, "of 64 KiB each: its quota"
    assert engine.regenerate([long]) == (expected[:1], [640])
    assert tenant.ask("check")["idle"]


NEWER = "import vllm; vllm.__version__ = '0.34.0'; "
OTHER_HOOK = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
KVConnectorBase_V1.update_state_after_alloc = lambda self, request, blocks, tokens, more: None
"""


def test_a_version_that_was_not_tested_is_served(start: Start, plain: Engine, daemon: tiercache.LaunchedDaemon) -> None:
    long = prompt(320, "newer")
    engine = start(daemon.address, patch=NEWER)
    expected = plain.generate([long])[0]
    assert engine.generate([long]) == (expected, [0])
    engine.await_hits(long)
    assert engine.regenerate([long]) == (expected, [320])
    assert len(engine.lines("vllm 0.34.0 is newer than 0.33, which tiercache was tested with: its")) == 1


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"adress": "/tmp"}, {}, "has no 'adress': did you mean 'address'?"),
        ({"load_timeout_s": "soon"}, {}, "kv_connector_extra_config: Expected `float`"),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "set it to sha256"),
        ({"address": "/nowhere/at/all"}, {}, "the cache at /nowhere/at/all is unavailable"),
        ({}, {"patch": "import vllm; vllm.__version__ = '0.31.0'"}, "serves vllm>=0.32, and this is 0.31.0"),
        ({}, {"patch": NEWER + OTHER_HOOK}, "calls update_state_after_alloc with other arguments"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    start: Start, plain: Engine, settings: dict[str, str], options: dict[str, str], words: str
) -> None:
    engine = start(settings.pop("address", "/nowhere"), settings=settings, **options)
    ids = prompt(100, "refused")
    assert engine.generate([ids]) == (plain.generate([ids])[0], [0])
    said = engine.lines("without")
    assert len(said) == 1, said
    assert "vLLM is served without the cache" in said[0]
    assert words in said[0]
