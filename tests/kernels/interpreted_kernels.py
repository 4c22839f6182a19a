"""All kernels in Triton's interpreter.

Not collected by itself: TRITON_INTERPRET=1 must be set before the kernels are decorated, so
`test_kernels_interpreted.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_kernels_interpreted.py, with TRITON_INTERPRET=1"

from attention_cases import *  # noqa: E402, F403 - the tests
from block_copy_cases import *  # noqa: E402, F403 - the tests
from checksum_cases import *  # noqa: E402, F403 - the tests

pytestmark = pytest.mark.kernels


@pytest.fixture
def device() -> str:
    return "cpu"
