"""Which layers share a block, and what that makes of pool sizes."""

from __future__ import annotations

import pytest

from tiercache.engine import EngineSettings
from tiercache.engine.layer_groups import MAX_GROUPS, LayerPlace, choose_block_layers, group_layers
from tiercache.engine.memory import fit_model_len
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
SETTINGS = EngineSettings(block_size=4, chunk_size=8, max_num_seqs=4)


def of_kinds(pattern: str, repeated: int, window: int = 512) -> tuple[int, ...]:
    """Windows of layers: `w` has one, `f` none."""
    return tuple(window if kind == "w" else 0 for kind in pattern * repeated)


def test_no_cut_loses_more_than_a_fifth_or_makes_too_many_groups() -> None:
    for full in range(1, 40):
        for windowed in range(1, 40):
            layers = choose_block_layers(full, windowed)
            if layers is None:
                continue
            groups = -(-full // layers) + -(-windowed // layers)
            assert groups <= MAX_GROUPS
            assert 5 * (groups * layers - full - windowed) <= groups * layers
            assert -(-full // layers) * layers < full + windowed


def test_layers_are_in_the_groups_of_their_kind() -> None:
    groups = group_layers(of_kinds("wwf", 3, window=10), 1000, SETTINGS)
    assert [group.layers for group in groups.groups] == [(2, 5, 8), (0, 1, 3), (4, 6, 7)]
    assert [window.size for window in groups.windows] == [0, 10, 10]
    assert groups.block_layers == 3
    assert groups.places[:6] == (
        LayerPlace(1, 0),
        LayerPlace(1, 1),
        LayerPlace(0, 0),
        LayerPlace(1, 2),
        LayerPlace(2, 0),
        LayerPlace(0, 1),
    )


@pytest.mark.parametrize(
    ("windows", "longest", "size"),
    [
        ((0, 0, 0), 1000, 0),
        ((10, 10), 1000, 10),
        ((10, 20), 1000, 20),
        ((10, 0), 10, 0),  # no sequence outgrows it
        ((10, 0), 11, 10),
    ],
)
def test_layers_of_one_kind_are_one_group(windows: tuple[int, ...], longest: int, size: int) -> None:
    groups = group_layers(windows, longest, SETTINGS)
    assert len(groups.groups) == (2 if (windows, longest) == ((10, 0), 11) else 1)
    assert groups.windows[-1].size == size


def test_a_pool_holds_what_all_groups_need() -> None:
    groups = group_layers(of_kinds("wf", 1, window=9), 1000, SETTINGS)

    def blocks_of(tokens: int) -> int:
        return groups.most_blocks(tokens, SETTINGS)

    most = groups.windows[1].most_blocks(SETTINGS)
    assert most == 2 + 3 + 1
    assert [blocks_of(tokens) for tokens in (1, 4, 5, 24, 25, 400)] == [2, 2, 4, 12, 13, 100 + most]
    assert fit_model_len(SETTINGS, 400, 1 << 20, 106, blocks_of) == 400
    assert fit_model_len(SETTINGS, 400, 1 << 20, 105, blocks_of) == 396
    assert fit_model_len(SETTINGS, 400, 1 << 20, 7, blocks_of) == 12
    longer = EngineSettings(block_size=4, chunk_size=8, max_num_seqs=4, max_model_len=400)
    with pytest.raises(ConfigError, match=r"the KV pool holds 396 tokens.* raise kv_cache_memory to 106MiB"):
        fit_model_len(longer, 400, 1 << 20, 105, blocks_of)
    with pytest.raises(ConfigError, match="has 1 blocks, and a sequence of one token takes 2, one for each group"):
        fit_model_len(SETTINGS, 400, 1 << 20, 1, blocks_of)
