"""The attention and KV write kernels in Triton's interpreter.

Not collected by itself: TRITON_INTERPRET=1 must be set before the kernels are decorated, so
`test_kernels_interpreted.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from _pytest.mark.structures import ParameterSet
from attention_cases import (
    CASES,
    WRITES,
    AttentionCase,
    WriteCase,
    check_attention,
    check_encoding,
    check_padding,
    check_write,
)

from tiercache.kernels.kv_formats import FORMATS

pytestmark = pytest.mark.kernels

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_kernels_interpreted.py, with TRITON_INTERPRET=1"


OFTEN = {
    "decode, split",
    "window, split",
    "all options, split",
    "one KV head, odd group",
    "no groups, block of 5",
    "bfloat16",
    "int8, grouped heads",
    "int4, odd sizes",
    "fp8_e5m2, decode, window, split",
}
"""Of what is alike, one case in the first ring."""


def _each(cases: Sequence[AttentionCase]) -> list[ParameterSet]:
    assert {case.name for case in cases} >= OFTEN
    return [pytest.param(case, id=case.name, marks=() if case.name in OFTEN else pytest.mark.stress) for case in cases]


@pytest.mark.parametrize("case", _each(CASES))
def test_writes_and_attention_equal_the_twins(case: AttentionCase) -> None:
    check_attention(case, "cpu")


def test_segments_without_tokens_get_zeros() -> None:
    check_padding("cpu")


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_writes_equal_the_twin(case: WriteCase) -> None:
    check_write(case, "cpu")


@pytest.mark.parametrize("spread", [pytest.param(0.0, marks=pytest.mark.stress), 2.0])
@pytest.mark.parametrize("name", FORMATS)
def test_records_equal_the_twin(name: str, spread: float) -> None:
    check_encoding(name, "cpu", spread, seed=1)
