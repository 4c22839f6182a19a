"""The table of faults in the README names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_each_fault_has_its_test() -> None:
    rows = re.findall(r"^\| (?!Fault|---)(.*) \| .* \| (.*) \|$", (HERE / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    for fault, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, fault
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (HERE / file).read_text(), re.MULTILINE), f"{file}::{test}"
