"""Beside other connectors, in vLLM's MultiConnector: what they bring is never taken for what vLLM has computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import BLOCK, PATIENCE_S, Engine, prompt, stored_blocks, transfer_config, wait_until
from vllm_sibling import FOREIGN

import tiercache
from tiercache.connectors.vllm_orders import RankForm, Report
from tiercache.connectors.vllm_siblings import WAIT_S, Roll, check_parent, come_first
from tiercache.errors import ConfigError, ModelRefused

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def multi_config(address: str, when: str, folder: Path, first: bool) -> dict[str, Any]:
    """Ours and a sibling, `first` or last."""
    ours = transfer_config(address, request_timeout_s=PATIENCE_S)
    sibling = {
        "kv_connector": "Sibling", "kv_connector_module_path": "vllm_sibling", "kv_role": "kv_both",
        "kv_connector_extra_config": {"when": when, "folder": str(folder)},
    }  # fmt: skip
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [sibling, ours] if first else [ours, sibling]},
    }  # fmt: skip


def test_blocks_that_a_sibling_fills_are_not_stored_as_what_they_were(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    """It fills blocks of a request that has ended while their store is still being copied; in both orders."""
    ids, rest = prompt(500, "computed"), prompt(520, "foreign")
    full = len(ids) // BLOCK * BLOCK
    with tiercache.launch("64MiB", region="16MiB", timeout_s=PATIENCE_S) as daemon:
        right = None
        for when, first in (("hook", True), ("start", False)):
            folder = tmp_path / when
            folder.mkdir()
            engine = start(
                kv_transfer_config=multi_config(str(daemon.address), when, folder, first),
                max_model_len=640, kv_cache_memory_bytes=24 * 64 << 10,
            )  # fmt: skip
            engine.offloads = False
            if right is not None:
                assert engine.generate([ids]) == (right, [full]), "the very first request finds what there is"
                with tiercache.Client.connect(daemon.address, map_arena=False) as client:
                    client.flush()
                engine.forget()
            engine.ask("hold", way="out", folder=str(folder))
            right, _ = engine.generate([ids])
            engine.generate([[FOREIGN, *rest]])
            assert list(folder.glob("held*"))
            assert (folder / "copied").exists()
            assert engine.regenerate([ids])[0] == right
            wait_until(lambda engine=engine: engine.regenerate([ids])[1] == [full])  # type: ignore[misc]
            assert engine.regenerate([ids])[0] == right
            engine.close()
        assert stored_blocks(daemon) >= full // BLOCK


def parent(policy: str = "recompute", sibling: str = "NixlConnector") -> Any:
    connectors = [{"kv_connector": sibling}, {"kv_connector": "TierCacheConnector"}]
    config = SimpleNamespace(
        kv_connector="MultiConnector", kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": connectors},
    )  # fmt: skip
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
    come_first(top, ours)
    orders = SimpleNamespace(metadata=("theirs", "ours"))
    top.handle_preemptions(orders)
    assert called == ["ours", orders]
    with pytest.raises(ModelRefused, match="SimpleNamespace"):
        come_first(SimpleNamespace(sub_connectors=[]), ours)


def test_requests_wait_until_all_ranks_have_said_what_their_blocks_are() -> None:
    now_s = 0.0
    roll = Roll(2, clock=lambda: now_s)
    for name in "abc":
        roll.add(SimpleNamespace(request_id=name))
    assert roll.waits("a")
    assert roll.call(Report(forms={1: RankForm([], absence="1")})) == []
    roll.remove("b")
    assert not roll.waits("b")
    now_s = WAIT_S + 1
    assert not roll.waits("a")
    assert roll.waits("c"), "it has asked just now"
    report = Report(forms={0: RankForm([], absence="0")}).aggregate(Report(forms={1: RankForm([], absence="1")}))
    assert [form.absence for form in roll.call(report)] == ["0", "1"]
    assert list(roll.waiting) == ["c"]
