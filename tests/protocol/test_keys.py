"""What is not a token id and no key is refused, not rounded: other tokens' blocks would be found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiercache.connector.connector import check_keys
from tiercache.protocol.keys import KeyChain


@pytest.mark.parametrize(
    "tokens", [[0.9, 1.9], [True, False], [-1], [1 << 32], [1 << 70], np.array([0, np.nan]), ["1"]]
)
def test_what_is_no_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="token ids must be integers from 0 to 4294967295"):
        KeyChain(bytes(16), 2, tokens)


def test_keys_that_are_no_bytes_are_refused() -> None:
    for keys in (b"", bytearray(16), memoryview(bytes(32))):
        check_keys(keys)
    with pytest.raises(TypeError, match="keys are bytes"):
        check_keys("x" * 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="these are 17 bytes"):
        check_keys(bytes(17))
