"""KV formats: their bytes, and what they lose."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tiercache.kernels.kv_formats import FORMATS, BlockFormat

pytestmark = pytest.mark.kernels
NATIVE_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def test_the_bytes_of_an_int8_record() -> None:
    key = torch.tensor([[1.0, -254.0], [127.0, 0.0]]).view(2, 1, 2)  # two slots, one head, two channels
    value = torch.tensor([[127.0, 63.0], [0.0, 0.0]]).view(2, 1, 2)
    record = BlockFormat("int8", 2, 1, 2).encode(key, value)
    one, two, least = [0x80, 0x3F], [0x00, 0x40], [0x80, 0x00]  # bf16 1, 2, and 2^-126 for zeros
    assert record.tolist() == [1, 129, 127, 0, 127, 63, 0, 0, *one, *two, *one, *least]


def test_the_bytes_of_an_int4_record() -> None:
    key = torch.tensor([[-3.0, 100.0], [12.0, 107.5]]).view(2, 1, 2)
    value = torch.tensor([[0.0, 30.0], [0.0, 0.0]]).view(2, 1, 2)
    form = BlockFormat("int4", 2, 1, 2)
    record = form.encode(key, value)
    # Channel 0 of K: a step of 1, from -3 on. Channel 1: 107.5 / 127, which becomes 0.875, from 114 steps on.
    key_parts = [0x00, 0x9F], [255, 255 - 4], [256 - 3, 114], [2032 % 256, 2032 // 256]
    # Token 0 of V: a step of 2. Token 1 is zero, and its step 2^-16 of that, the least there is.
    value_parts = [0xF0, 0x00], [255, 0], [0, 0], [2048 % 256, 2048 // 256]
    (codes, *key_rest, key_base), (value_codes, *value_rest, value_base) = key_parts, value_parts
    expected = [codes, value_codes, *key_rest, *value_rest, key_base, value_base]
    assert record.tolist() == [byte for part in expected for byte in part]
    key_back, value_back = form.decode(record, torch.float32)
    assert key_back.tolist() == [[[-3.0, 114 * 0.875], [12.0, 123 * 0.875]]]
    assert value_back.tolist() == [[[0.0, 30.0], [0.0, 0.0]]]


class Divisors(TorchFunctionMode):
    """Collects what is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.div, torch.Tensor.div, torch.Tensor.__truediv__):
            self.seen.append(args[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_quotients_are_rounded_correctly_on_a_gpu_too(name: str) -> None:
    """There torch divides by a plain number by multiplying with its reciprocal, and the last bit differs."""
    with Divisors() as divisors:
        BlockFormat(name, 8, 2, 16).encode(*torch.randn(2, 8, 2, 16))
    assert divisors.seen
    assert all(isinstance(divisor, torch.Tensor) for divisor in divisors.seen)


@pytest.mark.parametrize("name", NATIVE_FP8)
def test_every_fp8_code_is_read_as_torch_reads_it(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    native = codes.view(NATIVE_FP8[name]).float()
    record = torch.zeros(BlockFormat(name, 256, 1, 1).record_bytes, dtype=torch.uint8)
    form = BlockFormat(name, 256, 1, 1)
    form.view(record, "key").copy_(codes.view(1, 256, 1))
    form.view(record, "key_scale").fill_(0.25)
    finite = native.isfinite()
    assert torch.equal(form.decode(record, torch.float32)[0].view(-1)[finite], native[finite] * 0.25)


def test_a_format_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="int4 needs an even head_dim, not 5"):
        BlockFormat("int4", 16, 2, 5)
    with pytest.raises(ValueError, match="'int3' is not a KV format: take one of fp8_e4m3"):
        BlockFormat("int3", 16, 2, 4)


# --- what is lost


def allowed_error(name: str, part: str, x: torch.Tensor, size: int, head_dim: int) -> torch.Tensor:
    """The largest error of each number that the format's description allows; x is `[n, slot, head, channel]`."""
    if name in NATIVE_FP8:
        mantissa, least = (3, 2.0**-9) if name == "fp8_e4m3" else (2, 2.0**-16)
        largest = x.abs().amax(dim=(1, 3), keepdim=True) / (448 if name == "fp8_e4m3" else 57344)
        return torch.maximum(x.abs() * 2.0 ** -(mantissa + 1), 2 * largest * least / 2)
    if name == "int8":
        return x.abs().amax(dim=1 if part == "key" else 3, keepdim=True) / 127 * (1 + 2**-7) / 2
    axis, group = (1, math.gcd(32, size)) if part == "key" else (3, math.gcd(32, head_dim))
    grouped = x.unflatten(axis, (-1, group))
    low, high = grouped.amin(dim=axis + 1, keepdim=True), grouped.amax(dim=axis + 1, keepdim=True)
    step = torch.maximum((high - low) / 15, torch.maximum(low.abs(), high.abs()) / 127) * (1 + 2**-4)
    return (step / 2).expand(grouped.shape).flatten(axis, axis + 1)


@pytest.mark.parametrize(
    ("size", "head_dim", "dtype"),
    [(16, 64, torch.float32), (8, 80, torch.bfloat16), (48, 20, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("name", FORMATS)
def test_no_number_is_further_off_than_allowed(name: str, size: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    form = BlockFormat(name, size, 3, head_dim)
    key, value = torch.randn(2, 5, size, 3, head_dim, generator=generator)
    key[..., 3] += 20.0
    key[..., 7] *= 30.0
    value[1] = 0.0
    key[2, :, 1] = 0.0
    if dtype is torch.float32:
        key[3], value[3], key[4], value[4] = key[3] * 1e30, value[3] * 1e30, key[4] * 1e-30, value[4] * 1e-30
    key, value = key.to(dtype), value.to(dtype)
    records = form.encode(key, value)
    assert records.shape == (5, form.record_bytes)
    for part, given, back in zip(("key", "value"), (key, value), form.decode(records, torch.float32), strict=True):
        error = (back.transpose(1, 2) - given.float()).abs()
        assert (error <= allowed_error(name, part, given.float(), size, head_dim) * 1.0001).all(), part
        assert torch.equal(back.transpose(1, 2)[given == 0], torch.zeros(int((given == 0).sum())))
    assert torch.equal(form.encode(key, value), records)  # the same bytes for the same numbers, always
