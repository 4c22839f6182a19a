"""`tiercache doctor` on a shared store: a good one, one that is away, one that lies, and what it says of a hit."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from valkey_rig import ValkeyServer

from tiercache.cli.doctor import store as doctor_store
from tiercache.cli.doctor.findings import Finding, State
from tiercache.cli.doctor.store import Prefill, examine
from tiercache.cli.main import main
from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import StoreUrl

PREFILL = Prefill("a model", 1.0, 1 << 30)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_store, "PART_S", 0.02)


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def config_of(url: str, **fields: Any) -> DaemonConfig:
    return DaemonConfig(
        shared=StoreUrl(url), **({"shared_plain": True} if "shared_key" not in fields else {}), **fields
    )


def look(config: DaemonConfig, measure: bool = True) -> dict[str, Finding]:
    return {one.name: one for one in examine(config, {}, "", PREFILL, measure)}


@pytest.mark.parametrize("sealed", [False, True])
def test_a_good_store_is_tried_and_left_as_it_was(valkey: ValkeyServer, sealed: bool, tmp_path: Path) -> None:
    config = config_of(valkey.url)
    if sealed:
        pytest.importorskip("cryptography")
        key = tmp_path / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        config = config_of(valkey.url, shared_key=key)
    found = look(config)
    assert [one.state for one in found.values() if one.name not in ("a hit pays", "no hit pays")] == [State.OK] * 3
    assert ("encrypted" if sealed else "in plain") in found[valkey.url].figure
    assert "fetched on 4 connections" in found["speed"].figure
    assert valkey.ask("DBSIZE") == b":0"
    assert look(config, measure=False)["speed"].state is State.NOT_APPLICABLE


def only(found: dict[str, Finding]) -> Finding:
    [one] = found.values()
    assert one.state is State.FAILURE
    assert one.remedy
    assert "\n" not in one.figure + one.remedy
    return one


def test_one_that_is_away_or_refuses_us_is_one_line(valkey: ValkeyServer) -> None:
    with ValkeyServer() as other:
        gone = other.url
    assert "Connection refused" in only(look(config_of(gone))).figure
    refused = only(look(config_of(valkey.url.replace("://", "://:open-sesame@"))))
    assert "open-sesame" not in refused.figure + refused.remedy
    assert "no kind of store is called 'tape'" in only(look(config_of("tape://robot"))).figure
    missing = only(look(config_of(valkey.url, shared_key=Path("/nonexistent/key"))))
    assert "shared_key" in missing.figure


def test_one_that_gives_other_bytes_is_found_out(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor_store._Trial._put

    def put_and_spoil(trial: Any) -> None:
        real(trial)
        valkey.ask("SETRANGE", trial._name, 5000, "spoilt")

    monkeypatch.setattr(doctor_store._Trial, "_put", put_and_spoil)
    assert only(look(config_of(valkey.url))).figure == "fetching a block: other bytes came back than were sent"
    assert valkey.ask("DBSIZE") == b":0"


def test_the_command(
    valkey: ValkeyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCACHE_ARENA", "16MiB")
    command = ["doctor", "--quick", "--json", "--shared", valkey.url, "--address", str(tmp_path / "none")]
    assert main(command) == 0
    found = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["topic"] == "shared store"]
    assert [one["state"] for one in found] == ["ok", "ok", "not applicable"]
    assert main([*command, "--prefill", "-1"]) == 2
    assert "--prefill -1: is a number of tokens per second" in capsys.readouterr().err
