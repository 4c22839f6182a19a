"""SGLang finds what other SGLangs have computed, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix
from sglang_rig import FULL, MAMBA, SWA, CacheConfig, Rig
from waiting import wait_until

import tiercache


@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
@pytest.mark.parametrize(
    ("form", "pages", "layout"),
    [
        *((FULL, 8, layout) for layout in ("page_first", "page_first_direct", "layer_first")),
        (SWA, 12, "page_first"),
        (MAMBA, 4, "page_first"),
    ],
    ids=["page first", "page first, direct", "layer first", "window", "state"],
)
def test_pages_of_one_engine_are_hits_in_the_next(
    rig: Rig, form: CacheConfig, pages: int, layout: str, mode: str
) -> None:
    first, second = (rig.engine(form, layout=layout, mode=mode) for _ in range(2))
    tokens = rig.tokens(pages, form)
    rig.compute(first, tokens)
    rig.store(first, tokens)
    assert rig.prefetch(second, tokens) == len(tokens)
    for wanted, got in zip(rig.contents(first, tokens), rig.contents(second, tokens), strict=True):
        assert torch.equal(wanted, got)


def test_a_window_that_is_not_whole_shortens_the_prefix(rig: Rig) -> None:
    """The last page of the window is gone: the prefix ends one page earlier, where there is a whole one."""
    first, second = (rig.engine(SWA) for _ in range(2))
    tokens = rig.tokens(12, SWA)
    rig.compute(first, tokens)
    rig.store(first, tokens)
    hashes = first.tree.tree_core.get_hash_values(match_prefix(first.tree, tokens).last_device_node)
    assert (
        first.backend.pools["swa"].connector.flush(
            key=first.backend.names.keys(first.backend.names.root(), hashes[-1:])
        )
        == 1
    )
    left = tokens[: -SWA.page_size]
    assert rig.prefetch(second, tokens) == len(left)
    for wanted, got in zip(rig.contents(first, left), rig.contents(second, left), strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("cfg", [FULL, SWA, MAMBA], ids=["full", "window", "state"])
def test_pages_come_from_nvme(model: Path, tmp_path: Path, cfg: CacheConfig) -> None:
    disk = {"nvme": str(tmp_path / "disk"), "nvme_size": "64MiB", "nvme_segment": "16MiB"}
    with (
        tiercache.launch("64MiB", region="16MiB", **disk) as own,
        Rig(model, own.address) as rig,
        tiercache.Client.connect(own.address, map_arena=False) as client,
    ):
        first, second = (rig.engine(cfg) for _ in range(2))
        tokens = rig.tokens(8, cfg)
        rig.compute(first, tokens)
        rig.store(first, tokens)

        def on_nvme() -> bool:
            tiers = client.stats()["tiers"]
            return 0 < tiers["dram"]["blocks"] == tiers["nvme"]["blocks"]

        wait_until(on_nvme)
        for end in (len(tokens) // 2, len(tokens)) if cfg is FULL else (len(tokens),):
            client.flush(tier="dram")
            assert rig.prefetch(second, tokens[:end]) == end, "the second time from the middle of the chain"
            assert client.stats()["tiers"]["nvme"]["promoted_blocks"] > 0
        for wanted, got in zip(rig.contents(first, tokens), rig.contents(second, tokens), strict=True):
            assert torch.equal(wanted, got)
