"""Attention and KV write kernels: the twin, what is refused, what the compiler makes of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tiercache.kernels import kv_write, tile_shapes  # noqa: E402
from tiercache.kernels import paged_attention as attention  # noqa: E402
from tiercache.kernels.kv_formats import BlockFormat  # noqa: E402
from tiercache.kernels.kv_tiles import PagedKv, TileFormat  # noqa: E402

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

SHARED_MEMORY_BYTES = {80: 163 << 10, 90: 227 << 10}
"""What one program may use, by compute capability."""
BLOCK, KV_HEADS, LAYERS, GROUP = 16, 8, 32, 4


@pytest.mark.parametrize(("start", "end"), [(0, 40), (33, 40), (39, 40)])
def test_the_twin_is_torchs_own_attention(start: int, end: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(6, end - start, 16, generator=generator)
    key, value = torch.randn(2, end, 2, 16, generator=generator)
    twin = attention.paged_attention_reference(query, [key], [value], [start], scale=0.3)
    mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)
    torchs = torch.nn.functional.scaled_dot_product_attention(
        query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], mask, scale=0.3, enable_gqa=True
    )
    assert torch.allclose(twin.transpose(0, 1), torchs[0], atol=1e-5)


def test_the_twin_knows_window_softcap_and_sinks() -> None:
    query, key = torch.tensor([[[2.0]]]), torch.tensor([[[9.0]], [[0.0]], [[1.0]]])
    value = torch.tensor([[[5.0]], [[1.0]], [[3.0]]])
    sinks = torch.tensor([0.5])
    found = attention.paged_attention_reference(
        query, [key], [value], [2], scale=1.0, window=2, softcap=4.0, sinks=sinks
    )
    weights = torch.tensor([0.0, 4.0 * torch.tanh(torch.tensor(0.5)).item(), 0.5]).exp()
    assert found.item() == pytest.approx(((1.0 * weights[0] + 3.0 * weights[1]) / weights.sum()).item(), rel=1e-6)


def formats(name: str, head_dim: int) -> tuple[TileFormat, TileFormat]:
    """What the kernels know of the pool and of the tails."""
    tails = torch.empty((1, LAYERS, 2, BLOCK, KV_HEADS, head_dim), device="meta")
    if name == "raw":
        return TileFormat.of(tails), TileFormat.of(tails)
    pool = torch.empty((1, LAYERS, 1), device="meta")
    return TileFormat.of(pool, BlockFormat(name, BLOCK, KV_HEADS, head_dim)), TileFormat.of(tails)


def compiled(kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """A kernel as it would run on a GPU of this capability; needs no GPU. Tables and strides are aligned to 16."""
    given: dict[str, Any] = types | dict.fromkeys(constants, "constexpr")
    places = [parameter.name for parameter in kernel.params]
    assert sorted(places) == sorted(given)
    signature = {name: given[name] for name in places}
    aligned = [name for name, kind in types.items() if kind[0] == "*" or name.endswith("stride")]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(places.index(name),): value for name, value in constants.items()},
        attrs={(places.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compiled_attention(
    capability: int, name: str, *, decode: bool, head_dim: int = 128, dtype: str = "bf16", options: bool = False
) -> Any:
    """`_attend` in the shape that the engine would choose."""
    form, tail_form = formats(name, head_dim)
    choose = tile_shapes.decode_shape if decode else tile_shapes.prefill_shape
    shape = choose(GROUP, form, torch.float32 if dtype == "fp32" else torch.bfloat16)
    floats = f"*{dtype}"
    types = {
        **dict.fromkeys(("out", "query", "tails", "sinks"), floats),
        "pool": floats if name == "raw" else "*u8",
        **dict.fromkeys(("parts", "stats"), "*fp32"),
        **dict.fromkeys(("segments", "tables", "tiles"), "*i32"),
        **dict.fromkeys(("layer", "token_stride", "head_stride"), "i32"),
        "scale": "fp32",
    }
    constants = {
        "SOFTCAP": 30.0 if options else 0.0,
        "WINDOW": 1000 if options else 0,
        "SINKS": options,
        "GROUP": GROUP,
        "ROWS": shape.rows,
        "TILE": shape.tile,
        "TAIL": 16,
        "DIMS": form.dims,
        "SPLIT": decode,
        "UPCAST": False,
        "F": form,
        "T": tail_form,
    }
    options_of = {"num_warps": shape.warps, "num_stages": shape.stages}
    return compiled(attention._attend, capability, types, constants, **options_of)


def stack_bytes(kernel: Any, path: Path) -> int:
    """What spilled registers take of each thread's stack, by the assembler's account."""
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, timeout=60, check=True)
    found = re.findall(r"STACK:(\d+)", done.stdout)
    assert found, done.stdout
    return max(map(int, found))


@pytest.mark.parametrize(
    ("capability", "name", "decode"),
    [
        (90, "raw", True),
        (90, "int8", False),
        *(
            pytest.param(capability, name, decode, marks=pytest.mark.stress)
            for capability in (80, 90)
            for name in ("raw", "fp8_e4m3", "int8", "int4")
            for decode in (True, False)
        ),
    ],
)
def test_attention_compiles_for_gpus_without_spilling(capability: int, name: str, decode: bool, tmp_path: Path) -> None:
    kernel = compiled_attention(capability, name, decode=decode)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_MEMORY_BYTES[capability]
    assert stack_bytes(kernel, tmp_path / "cubin") == 0
    assert re.search(r"mma\.sync|wgmma\.mma_async", ptx), "the matrix units are used"
    # K and V come 16 bytes at a time, past the registers, while the tile before is computed.
    assert len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)) >= 8


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.stress)])
def test_raw_decode_reads_k_and_v_in_no_other_way(capability: int) -> None:
    ptx = compiled_attention(capability, "raw", decode=True).asm["ptx"]
    shape = tile_shapes.decode_shape(GROUP, formats("raw", 128)[0], torch.bfloat16)
    tile_bytes = 2 * shape.tile * 128 * 2
    # One tile before the loop and one in it; their block numbers are fetched a tile earlier.
    copies = 2 * tile_bytes // 16 // (32 * shape.warps)
    assert len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)) == copies
    # What else is loaded: the query's rows as vectors, the fields of tile and segment one by one.
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 16 * 128 * 2 // 16 // (32 * shape.warps)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "options"),
    [
        ("raw", 128, "bf16", True),
        ("raw", 256, "bf16", True),
        ("raw", 96, "bf16", False),
        ("raw", 64, "fp32", False),
        ("raw", 128, "fp32", False),
        ("int8", 256, "bf16", False),
        ("int4", 256, "bf16", False),
        ("int4", 96, "bf16", False),
        ("fp8_e5m2", 64, "bf16", True),
    ],
)
def test_other_shapes_do_not_spill_either(name: str, head_dim: int, dtype: str, options: bool, tmp_path: Path) -> None:
    for decode in (True, False):
        kernel = compiled_attention(90, name, decode=decode, head_dim=head_dim, dtype=dtype, options=options)
        assert kernel.metadata.shared <= SHARED_MEMORY_BYTES[90]
        assert stack_bytes(kernel, tmp_path / "cubin") == 0, "decode" if decode else "prefill"


@pytest.mark.stress
@pytest.mark.parametrize("capability", [80, 90])
def test_the_parts_of_a_split_are_put_together_in_vectors(capability: int, tmp_path: Path) -> None:
    form, _ = formats("raw", 128)
    types = {
        **dict.fromkeys(("out", "sinks"), "*bf16"),
        **dict.fromkeys(("parts", "stats"), "*fp32"),
        **dict.fromkeys(("segments", "tiles"), "*i32"),
        "splits": "i32",
    }
    constants = {
        "WINDOW": 0,
        "SINKS": False,
        "GROUP": GROUP,
        "ROWS": 16,
        "TILE": 64,
        "DIMS": 128,
        "F": form,
    }
    kernel = compiled(attention._combine, capability, types, constants, num_warps=4)
    assert len(re.findall(r"ld\.global\.(?:v4\.b32|v2\.b64)", kernel.asm["ptx"])) >= 16 * 128 * 4 // 16 // 128
    assert stack_bytes(kernel, tmp_path / "cubin") == 0


@pytest.mark.stress
@pytest.mark.parametrize("name", ["raw", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("capability", [80, 90])
def test_writes_compile_for_gpus_and_use_vectors(capability: int, name: str, tmp_path: Path) -> None:
    form, tail_form = formats(name, 128)
    strides = [f"{part}_{axis}_stride" for part in ("key", "value") for axis in ("head", "token")]
    types = {**dict.fromkeys(("key", "value"), "*bf16"), **dict.fromkeys(["layer", *strides], "i32")}
    if name == "raw":
        types |= {"pool": "*bf16", "slots": "*i32"}
        constants: dict[str, Any] = {"HEADS": KV_HEADS, "DIMS": 128, "F": form}
        kernel = compiled(kv_write._write_tokens, capability, types, constants, num_warps=4)
        vectors = 2 * KV_HEADS * 128 * 2 // 16 // 128
        assert len(re.findall(r"st\.global\.v4\.b32", kernel.asm["ptx"])) == vectors
    else:
        types |= {"pool": "*u8", "tails": "*bf16", **dict.fromkeys(("segments", "tables", "items"), "*i32")}
        constants = {"SLOTS": BLOCK, "DIMS": 128, "F": form, "T": tail_form}
        kernel = compiled(kv_write._write_blocks, capability, types, constants, num_warps=4, enable_fp_fusion=False)
        assert kernel.metadata.shared <= SHARED_MEMORY_BYTES[capability]
        # Correctly rounded quotients, for the twin's sake.
        assert "div.rn.f32" in kernel.asm["ptx"]
        assert "div.full.f32" not in kernel.asm["ptx"]
    assert stack_bytes(kernel, tmp_path / "cubin") == 0
    assert len(re.findall(r"ld\.global\.v4\.b32", kernel.asm["ptx"])) >= 2


def test_a_kernel_finds_every_field_of_a_format() -> None:
    """There a format is a `constexpr`, and Triton 3.6 takes an attribute of that first: `value` was one."""
    assert not set(TileFormat._fields) & set(dir(triton.language.constexpr(0)))  # rule: of a NamedTuple


def test_what_does_not_fit_is_refused() -> None:
    kv = PagedKv.raw(torch.zeros(2, 1, 2, 8, 2, 16))
    words = torch.zeros(1, 5, dtype=torch.int32)
    shape = tile_shapes.TileShape(16, 16, 4, 2)
    options: dict[str, Any] = {"layer": 0, "shape": shape, "splits": 1, "scale": 1.0}
    good, out = torch.zeros(4, 3, 16), torch.zeros(3, 4, 16)
    for query, target, text in (
        (torch.zeros(3, 3, 16), out, "3 heads of 16 do not fit 2 KV heads"),
        (torch.zeros(4, 3, 32), out, "4 heads of 32 do not fit"),
        (torch.zeros(64, 3, 16), out, "64 heads of 16 do not fit"),
        (good.transpose(1, 2).contiguous().transpose(1, 2), out, "dense in its last axis"),
        (good, torch.zeros(4, 3, 16).transpose(0, 1), "dense"),
    ):
        with pytest.raises(ValueError, match=text):
            attention.paged_attention(query, kv, words, words, words, target, **options)
    strided = torch.zeros(2, 16, 3).transpose(1, 2)
    with pytest.raises(ValueError, match="dense in their last axis"):
        kv_write.write_tokens(kv.pool, 0, words[0], strided, strided)
    with pytest.raises(ValueError, match="dense in their last axis"):
        kv_write.write_blocks(kv, 0, words, words, words, strided, strided)


def test_tiles_cover_every_query_once_and_the_longest_come_first() -> None:
    assert tile_shapes.tiles_of([(0, 1), (2, 5)], 2) == [(0, 0), (2, 4), (2, 2), (2, 0)]
    assert tile_shapes.tiles_of([(1, 4)], 4) == [(1, 0)]


def test_contexts_are_split_only_as_far_as_it_fills_the_gpu() -> None:
    choose = tile_shapes.choose_splits
    assert choose(tiles=1, kv_heads=8, tokens=8192, tile=64, processors=132) == 64
    assert choose(tiles=1, kv_heads=8, tokens=100, tile=64, processors=132) == 2
    assert choose(tiles=32, kv_heads=8, tokens=8192, tile=64, processors=132) == 2
    assert choose(tiles=256, kv_heads=8, tokens=8192, tile=64, processors=132) == 1
