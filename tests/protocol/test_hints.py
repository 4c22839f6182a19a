"""What a hint may say."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tiercache.protocol.hints import Hint
from tiercache.protocol.messages import MAX_HINT_MS, Priority


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["return_in_s", "ttl_s"])
def test_a_time_is_a_positive_number(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        Hint(**{name: seconds})  # type: ignore[arg-type]


def test_what_a_hint_may_say() -> None:
    with pytest.raises(ValueError, match="give only one of them"):
        Hint(done=True, return_in_s=3)
    with pytest.raises(ValueError, match="says nothing"):
        Hint()
    with pytest.raises(ValueError, match="7 is not a valid"):
        Hint(priority=7)  # type: ignore[arg-type]
    assert Hint(ttl_s=1e300).fields() == {"done": False, "return_in_ms": 0, "ttl_ms": MAX_HINT_MS, "priority": 0}
    assert Hint(return_in_s=1e-9, priority=Priority.HIGH).fields()["return_in_ms"] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hint(done=True).done = False  # type: ignore[misc]
