"""How long the state machines of hypothesis run.

In the first ring always the same examples, so that its result never depends on luck. A failure there prints the steps
as they were; to have them reduced to the fewest takes minutes. In `stress` other examples each time, and many more, and
a failure prints the fewest steps that lead to it.

    TestDram = in_first_ring(DramMachine)
    TestDramForLong = in_stress(DramMachine)
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine


def in_first_ring(machine: type[RuleBasedStateMachine], examples: int = 25, steps: int = 40) -> Any:
    """The test case of a machine for `make test`: the same examples each time."""
    how = settings(_COMMON, derandomize=True, max_examples=examples, stateful_step_count=steps, phases=[Phase.generate])
    return _case(machine, how)


def in_stress(machine: type[RuleBasedStateMachine], examples: int = 400, steps: int = 120) -> Any:
    """The test case of a machine for `make stress`: new examples each time."""
    longer: Any = type(f"{machine.__name__}ForLong", (machine,), {})  # a machine has one test case
    return pytest.mark.stress(_case(longer, settings(_COMMON, max_examples=examples, stateful_step_count=steps)))


def _case(machine: type[RuleBasedStateMachine], how: settings) -> Any:
    case: Any = machine.TestCase
    case.settings = how
    return case


_COMMON = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True)
