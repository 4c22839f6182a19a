"""KV cache groups that differ, without vLLM: what of them is kept under which key, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiercache.connectors.vllm.compat import kv_cache_interface, probe
from tiercache.connectors.vllm.groups import (
    GroupPart,
    check_groups,
    check_steps,
    leaves_last_token,
    make_pools,
    parts_of,
)
from tiercache.connectors.vllm.orders import BlockRun
from tiercache.connectors.vllm.stores import runs_of
from tiercache.copies.pool import Pool
from tiercache.errors import ModelRefused
from tiercache.protocol.namespaces import NamespaceSpec


def kind(name: str) -> Any:
    """The spec of a kind of layers, which is known by its name, as vLLM's are."""
    return type(name, (SimpleNamespace,), {})


FullAttentionSpec, SlidingWindowSpec, MambaSpec = map(kind, ("FullAttentionSpec", "SlidingWindowSpec", "MambaSpec"))
ChunkedLocalAttentionSpec = kind("ChunkedLocalAttentionSpec")
SlidingWindowMLASpec = kind("SlidingWindowMLASpec")  # DeepSeek V4's compressors have it


def config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer {at}"]) for at, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=range(len(groups)))


def full(size: int) -> Any:
    return FullAttentionSpec(block_size=size)


def window(size: int, tokens: int) -> Any:
    return SlidingWindowSpec(block_size=size, sliding_window=tokens)


def state(size: int, mode: str = "align", drafts: int = 0) -> Any:
    return MambaSpec(block_size=size, mamba_cache_mode=mode, num_speculative_blocks=drafts)


PARALLEL = SimpleNamespace(
    decode_context_parallel_size=1,
    prefill_context_parallel_size=1,
    distributed_executor_backend="external_launcher",
    world_size=1,
)
ENGINE = SimpleNamespace(parallel_config=PARALLEL)


def blocks(*ids: int, hashed: dict[int, int] | None = None) -> list[Any]:
    """vLLM's blocks; 0 is null. `hashed`: tokens before those that are in its own prefix cache."""
    known = hashed or {}
    return [SimpleNamespace(block_id=one, is_null=one == 0, block_hash_num_tokens=known.get(one)) for one in ids]


def test_blocks_of_two_sizes_meet_at_the_larger() -> None:
    groups = config(window(64, 100), full(32))
    assert check_groups(ENGINE, groups) == 64
    assert parts_of(groups) == [GroupPart(0, 64, window=2), GroupPart(1, 32, 0, 2), GroupPart(1, 32, 1, 2)]
    assert not leaves_last_token(groups)


@pytest.mark.parametrize(("tokens", "windows"), [(20, [1]), (40, [1, 1]), (100, [2, 2]), (70, [1, 2]), (1, [])])
def test_of_small_blocks_only_those_within_a_window_are_kept(tokens: int, windows: list[int]) -> None:
    assert [part.window for part in parts_of(config(full(64), window(32, tokens)))[1:]] == windows


def test_a_state_is_a_window_of_one_block() -> None:
    groups = config(state(96), full(96))
    assert parts_of(groups) == [GroupPart(0, 96, window=1, state=True), GroupPart(1, 96)]
    assert leaves_last_token(groups)
    assert leaves_last_token(config(window(32, 97), full(32)))  # whose first token would be in a block that is gone
    assert not leaves_last_token(config(window(32, 128), full(32)))


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([full(32), ChunkedLocalAttentionSpec(block_size=32)], "ChunkedLocalAttentionSpec are not served"),
        ([full(32), SlidingWindowMLASpec(block_size=32)], "SlidingWindowMLASpec are not served"),
        ([full(32), state(32, "all")], "mamba_cache_mode align"),
        ([full(32), state(32, drafts=2)], "speculative decoding"),
        ([full(31), window(32, 100)], "only meet every 992 tokens"),
    ],
)
def test_what_is_not_served_is_refused(specs: list[Any], said: str) -> None:
    with pytest.raises(ModelRefused, match=said):
        check_groups(ENGINE, config(*specs))


@pytest.mark.parametrize(
    ("parallel", "said"),
    [({"world_size": 2}, "a scheduler for each rank"), ({"decode_context_parallel_size": 2}, "context parallelism")],
)
def test_ranks_that_cannot_decide_alike_are_refused(parallel: dict[str, int], said: str) -> None:
    engine = SimpleNamespace(parallel_config=SimpleNamespace(**{**vars(PARALLEL), **parallel}))
    with pytest.raises(ModelRefused, match=said):
        check_groups(engine, config(full(32)))


def test_states_are_refused_where_steps_end_within_their_blocks() -> None:
    def engine(size: int) -> Any:
        return SimpleNamespace(cache_config=SimpleNamespace(block_size=size))

    check_steps(engine(64), config(full(64), state(32)))
    check_steps(engine(32), config(full(64), window(32, 64)))
    with pytest.raises(ModelRefused, match="blocks of 32 tokens, and those of states have 64"):
        check_steps(engine(32), config(full(32), state(64)))


def pools_of(
    group: Any, kv_caches: dict[str, torch.Tensor], mla: bool = False, device: str = "cpu"
) -> list[tuple[NamespaceSpec, Pool]]:
    """Namespaces and pools of an engine with one KV cache group and three blocks."""
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "LINEAR"))
    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(**vars(PARALLEL), rank=0, tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(kv_cache_layout="LBNHC", cache_dtype="auto"),
        device_config=SimpleNamespace(device_type=device),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(kv_caches, layer)),
        model_config=SimpleNamespace(use_mla=mla),
    )
    groups = SimpleNamespace(kv_cache_groups=[group], prefix_cacheable_group_ids=[0], num_blocks=3)
    return make_pools(engine, groups, kv_caches, "")


def memory_of(spec: Any, num_blocks: int = 3) -> torch.Tensor:
    """As vLLM allocates it."""
    return torch.zeros(kv_cache_interface.compute_layer_kv_cache_shape_bytes(spec, num_blocks), dtype=torch.int8)


def state_namespace(shapes: tuple[tuple[int, ...], ...], *dtypes: torch.dtype) -> NamespaceSpec:
    spec = kv_cache_interface.MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    [(namespace, _)] = pools_of(config(spec).kv_cache_groups[0], {"layer 0": memory_of(spec)})
    return namespace


def sparse_group(indexer: int = 132) -> tuple[Any, dict[str, torch.Tensor]]:
    """As vLLM has it for DeepSeek V3.2: in each layer MLA, and the keys of an indexer with `indexer` bytes a token."""
    mla = kv_cache_interface.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    keys = kv_cache_interface.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=indexer, dtype=torch.uint8)
    specs = {"0.attn": mla, "0.indexer.k_cache": keys, "1.attn": mla, "1.indexer.k_cache": keys}
    spec = kv_cache_interface.UniformTypeKVCacheSpecs.from_specs(specs)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=list(specs))
    return group, {name: memory_of(one) for name, one in specs.items()}


@pytest.mark.vllm
def test_the_keys_of_a_sparse_indexer_are_in_a_block_with_the_latents_that_they_index() -> None:
    """vLLM has no sparse attention on a CPU: this is all of it but the tokens."""
    group, kv_caches = sparse_group()
    [(namespace, pool)] = pools_of(group, kv_caches, mla=True)
    assert namespace.block_bytes == pool.block_bytes == 2 * 64 * (2 * 576 + 132)
    assert (namespace.tp_rank, namespace.tp_size) == (0, 1), "equal on all ranks"
    probe(pool, list(kv_caches.values()))
    [(other, _)] = pools_of(*sparse_group(indexer=68), mla=True)
    assert other.fingerprint() != namespace.fingerprint()


@pytest.mark.vllm
def test_states_of_other_types_or_order_are_others() -> None:
    """`--mamba-cache-dtype` and VLLM_SSM_CONV_STATE_LAYOUT change neither the memory's form nor its length."""
    usual, turned = ((3, 8), (2, 4)), ((8, 3), (2, 4))
    half, brain = torch.float16, torch.bfloat16
    kinds = [(usual, half, brain), (usual, brain, half), (usual, brain, brain), (turned, half, brain)]
    spaces = [state_namespace(shapes, *dtypes) for shapes, *dtypes in kinds]
    assert len({space.block_bytes for space in spaces}) == 1
    assert len({space.fingerprint() for space in spaces}) == len(kinds)
    assert state_namespace(usual, half, brain) == spaces[0]


@pytest.mark.vllm
def test_other_generations_of_gpus_have_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM chooses kernels for quantised layers by them."""
    spec = kv_cache_interface.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float16)
    names = set()
    for generation in ((9, 0), (10, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda generation=generation: generation)
        [(namespace, _)] = pools_of(config(spec).kv_cache_groups[0], {"layer 0": memory_of(spec)}, device="cuda")
        names.add(namespace.fingerprint())
    assert len(names) == 2


def test_each_part_has_its_blocks() -> None:
    parts = parts_of(config(window(64, 100), full(32)))
    tables = [blocks(0, 0, 13, 14), blocks(*range(1, 9))]
    assert runs_of(parts, tables, 1, 4) == (BlockRun(2, [13, 14]), BlockRun(1, [3, 5, 7]), BlockRun(1, [4, 6, 8]))
    assert runs_of(parts, tables, 3, 4, 2) == (BlockRun(1, [14]), BlockRun(1, [7]), BlockRun(1, [8]))


@pytest.mark.parametrize(
    ("computed", "hashed", "run"),
    [
        (40, {}, BlockRun(9, [7])),  # the step ends with this block
        (43, {7: 40}, BlockRun(9, [7])),  # vLLM itself would use it for these tokens
        (43, {7: 38}, BlockRun(0, [])),  # and here for a beginning of it
        (43, {3: 8}, BlockRun(1, [3])),
        (43, {}, BlockRun(0, [])),  # a state of some token in between
    ],
)
def test_only_states_of_their_place_are_stored(computed: int, hashed: dict[int, int], run: BlockRun) -> None:
    parts = parts_of(config(state(4)))
    table = blocks(0, 3, 0, 0, 0, 0, 0, 0, 0, 7, 8, hashed=hashed)
    assert runs_of(parts, [table], 0, 10, 0, computed) == (run,)
