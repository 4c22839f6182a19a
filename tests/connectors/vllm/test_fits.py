"""The self-test with which the connectors meet a version of vLLM that they were not tested with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from tiercache.connectors import vllm_tier
from tiercache.connectors.vllm import fits
from tiercache.connectors.vllm.compat import VERSION, base
from tiercache.connectors.vllm_tier import TierCacheTier
from tiercache.connectors.vllm_v1 import TierCacheConnector
from tiercache.copies.pool import Pool, Segment
from tiercache.errors import LayoutError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("ours", [TierCacheConnector, TierCacheTier])
def test_this_version_fits(ours: type) -> None:
    assert [*fits.hook_differences(ours), *fits.use_differences()] == []
    assert fits.misfit(ours, "0.34.0") == fits.misfit(ours, VERSION) == ""


def test_changed_hooks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = base.KVConnectorBase_V1
    monkeypatch.setattr(theirs, "update_state_after_alloc", lambda self, request, blocks, tokens: None)
    monkeypatch.setattr(theirs, "get_finished_count", theirs.handle_preemptions)
    monkeypatch.delattr(theirs, "handle_preemptions")
    monkeypatch.setattr(theirs, "__abstractmethods__", theirs.__abstractmethods__ | {"save_all"})
    assert list(fits.hook_differences(TierCacheConnector)) == [
        "does not call handle_preemptions",
        "calls update_state_after_alloc with other arguments",
        "wants save_all",
    ]
    said = fits.misfit(TierCacheConnector, "0.34.0")
    assert said == (
        "vllm 0.34.0 is newer than 0.33, which tiercache was tested with, and does not call handle_preemptions "
        "(and 2 more)"
    )


def test_a_probe_finds_blocks_elsewhere_than_expected() -> None:
    layers = torch.zeros(2, 5, 3, 8, dtype=torch.bfloat16)
    good, size = Pool.from_layers(list(layers)), 3 * 8 * 2
    fits.probe(good, list(layers))
    assert not layers.any(), "it leaves no trace"
    short = [Segment(base, stride, length - 2) for base, stride, length in good.segments]
    spilling = [Segment(layers.data_ptr() - (number == 0) * 2, size, size) for number in range(2)]
    swapped = [Segment(good.segments[0].base, size, size), Segment(good.segments[0].base, size, size)]
    for segments in (short, spilling, swapped):
        with pytest.raises(LayoutError, match="not where tiercache expects them"):
            fits.probe(Pool(segments, 5, "cpu", True, layers), list(layers))


def test_hooks_that_stand_aside(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However they are called."""
    body = {name: value for name, value in vars(TierCacheTier).items() if name not in ("__dict__", "__weakref__")}
    ours: Any = type("Ours", (SecondaryTierManager,), body)
    monkeypatch.setattr(fits, "misfit", lambda ours: "vllm 9 differs")
    assert not fits.fit(ours, "It", vllm_tier.ANSWERS)
    tier = ours(None, memoryview(np.zeros((2, 8), np.int8)), "Class", address="/nowhere")
    assert "It is served without the cache: vllm 9 differs" in caplog.text
    assert tier.lookup(b"key", None, "more").name == "MISS"
    tier.submit_load(SimpleNamespace(job_id=3), 1)
    tier.submit_store(SimpleNamespace(job_id=4))
    assert [(result.job_id, result.success) for result in tier.get_finished_jobs()] == [(3, False), (4, False)]
    assert list(tier.get_finished_jobs()) == []
    tier.drain_jobs()
    tier.shutdown()
