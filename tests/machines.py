"""How long the state machines of hypothesis run.

Always the same examples, so that no result depends on luck: few in the first ring, many long ones in `stress`. With
RANDOM_EXAMPLES=1 in the environment those of `stress` are others each time, to look for what nobody has seen. A failure
in the first ring prints the steps as they were; in `stress` it prints the fewest steps that lead to it, which may take
minutes.

    TestDram = in_first_ring(DramMachine)
    TestDramForLong = in_stress(DramMachine)
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine


def in_first_ring(machine: type[RuleBasedStateMachine], examples: int = 25, steps: int = 40) -> Any:
    """The test case of a machine for `make test`: the same examples each time."""
    how = settings(_COMMON, derandomize=True, max_examples=examples, stateful_step_count=steps, phases=[Phase.generate])
    return _case(machine, how)


def in_stress(machine: type[RuleBasedStateMachine], examples: int = 400, steps: int = 120) -> Any:
    """The test case of a machine for `make stress`. A busy machine may take ten times as long as a quiet one."""
    longer: Any = type(f"{machine.__name__}ForLong", (machine,), {})  # a machine has one test case
    same = not os.environ.get("RANDOM_EXAMPLES")
    how = settings(_COMMON, derandomize=same, max_examples=examples, stateful_step_count=steps)
    return pytest.mark.timeout(1200)(pytest.mark.stress(_case(longer, how)))


def _case(machine: type[RuleBasedStateMachine], how: settings) -> Any:
    case: Any = machine.TestCase
    case.settings = how
    return case


_COMMON = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True)
