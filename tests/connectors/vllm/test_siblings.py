"""Beside other connectors, in vLLM's MultiConnector: what they bring is never taken for what vLLM has computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.connectors.vllm.orders import RankForm, WorkerReport
from tiercache.connectors.vllm.siblings import WAIT_S, Roll, check_parent, come_first
from tiercache.errors import ConfigError, ModelRefused


def parent(policy: str = "recompute", sibling: str = "NixlConnector") -> Any:
    connectors = [{"kv_connector": sibling}, {"kv_connector": "TierCacheConnector"}]
    config = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": connectors},
    )
    return SimpleNamespace(_kv_transfer_config=config)


def test_what_the_top_has_to_say_is_said() -> None:
    check_parent(parent())
    with pytest.raises(ConfigError, match=r'"kv_load_failure_policy": "recompute" next to .*"MultiConnector"'):
        check_parent(parent("fail"))
    with pytest.raises(ModelRefused, match="MoRIIOConnector"):
        check_parent(parent(sibling="MoRIIOConnector"))


def test_our_hook_is_called_before_those_of_siblings() -> None:
    called: list[Any] = []
    ours = SimpleNamespace(handle_preemptions=called.append)
    top = SimpleNamespace(sub_connectors=[object(), ours], handle_preemptions=called.append)
    hook = come_first(top, ours)
    orders = SimpleNamespace(metadata=("theirs", "ours"))
    top.handle_preemptions(orders)
    assert called == ["ours", orders]
    hook(orders)
    assert called == ["ours", orders, "ours"]
    with pytest.raises(ModelRefused, match="SimpleNamespace"):
        come_first(SimpleNamespace(sub_connectors=[]), ours)


def test_requests_wait_until_all_ranks_have_said_what_their_blocks_are() -> None:
    now_s = 0.0
    roll = Roll(2, clock=lambda: now_s)
    for name in "abc":
        roll.add(SimpleNamespace(request_id=name))
    assert roll.waits("a")
    assert roll.call(WorkerReport(forms={1: RankForm([], absence="1")})) == []
    roll.remove("b")
    assert not roll.waits("b")
    now_s = WAIT_S + 1
    assert not roll.waits("a")
    assert roll.waits("c"), "it has asked just now"
    report = WorkerReport(forms={0: RankForm([], absence="0")}).aggregate(
        WorkerReport(forms={1: RankForm([], absence="1")})
    )
    assert [form.absence for form in roll.call(report)] == ["0", "1"]
    assert list(roll.waiting) == ["c"]
