"""Settings: where they come from, what they refuse, and that the printed file reads back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.config.daemon_config import (
    DaemonConfig,
    control_endpoint,
    default_address,
    default_run_dir,
    load_config,
    render_toml,
    resolve_config,
    session_socket_path,
)
from tiercache.config.setting_kinds import MAX_REGIONS, MAX_SOCKET_PATH_BYTES
from tiercache.config.settings import SETTINGS
from tiercache.config.settings_schema import OF_THE_CHART, written_into
from tiercache.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
SCHEMA = Path(__file__).parents[2] / "daemon" / "deploy" / "helm" / "tiercache" / "values.schema.json"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tiercache.toml"
    path.write_text(text)
    return path


def test_empty_variables_and_those_of_kubernetes_are_left_alone() -> None:
    from_kubernetes = {"TIERCACHE_PORT": "tcp://10.0.0.1:80", "TIERCACHE_SERVICE_HOST": "10.0.0.1"}
    empty = {"TIERCACHE_ARENA": "", "TIERCACHE_MAX_SESSIONS": ""}
    config = load_config(None, {"TIERCACHE_RUN_DIR": "/x", **empty, **from_kubernetes}, {})
    assert (config.run_dir, config.arena_bytes, config.region_bytes) == (Path("/x"), 4 * GIB, 256 * MIB)
    assert config.quarantine_per_client_bytes == GIB
    assert config.max_sessions == 256
    assert config.region_sizes() == [256 * MIB] * 16


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'arena = "1GiB"\nmax_sessions = 7\npin_share = 0.25\n')
    env = {"TIERCACHE_ARENA": "2GiB", "TIERCACHE_MAX_SESSIONS": "8", "TIERCACHE_CONFIG": "/nowhere.toml"}
    config, sources, _ = resolve_config(path, env, {"arena": "3GiB", "policy": None})
    assert (config.arena_bytes, config.max_sessions, config.pin_share) == (3 * GIB, 8, 0.25)
    wanted = {"arena": "--arena", "max_sessions": "TIERCACHE_MAX_SESSIONS", "pin_share": str(path), "policy": "default"}
    assert {key: sources[key] for key in wanted} == wanted
    assert load_config(None, {"TIERCACHE_CONFIG": str(path)}).max_sessions == 7, "the environment names the file"


@pytest.mark.parametrize(
    ("flags", "env", "text", "words"),
    [
        ({"arena": "lots"}, {}, "", ["arena = lots", "--arena", "16GiB"]),
        ({}, {"TIERCACHE_ARENA": "16Gb i"}, "", ["arena", "16Gb i", "TIERCACHE_ARENA", "write for example"]),
        ({}, {}, 'arena = "1KiB"', ["arena", "1KiB", "tiercache.toml", '"2MiB" to "64TiB"']),
        ({"region": "3MiB"}, {}, "", ["region", "3MiB", "--region", "4MiB"]),
        ({"region": 0}, {}, "", ["region", "2MiB"]),
        ({"nvme_segment": "65GiB"}, {}, "", ["nvme_segment", "at most 64GiB"]),
        ({"pin_share": "1.5"}, {}, "", ["pin_share", "1.5", "0 to 1"]),
        ({"pin_share": "nan"}, {}, "", ["pin_share", "nan", "0 to 1"]),
        ({"max_sessions": "0"}, {}, "", ["max_sessions", "0", "1 to 4096"]),
        ({"max_sessions": "many"}, {}, "", ["max_sessions", "many", "whole number"]),
        ({"lease_ttl_max": "2h"}, {}, "", ["lease_ttl_max", "2h", "--lease-ttl-max", "600s"]),
        ({}, {}, 'policy = "best"', ["policy", "tiercache.toml", "must be one of: lru, hazard"]),
        ({"arena": "9" * 400}, {}, "", ["arena", "--arena"]),
        ({"run_dir": ""}, {}, "", ["run_dir", "--run-dir", "path"]),
        ({}, {}, "lock_memory = true", ["lock_memory", "True", "auto, off, require"]),
        ({}, {}, "arena = true", ["arena", "True", "bool"]),
        ({}, {}, 'what_if = "maybe"', ["what_if", "maybe", "yes or no"]),
        ({}, {}, 'arean = "1GiB"', ["arean", "tiercache.toml", "did you mean arena?"]),
        ({}, {}, "[daemon]\narena = 1", ["daemon", "no such setting"]),
        ({}, {"TIERCACHE_AREAN": "1GiB"}, "", ["TIERCACHE_AREAN", "1GiB", "did you mean TIERCACHE_ARENA?"]),
        ({"max_session": 3}, {}, "", ["max_session", "did you mean max_sessions?"]),
        ({}, {}, "arena = ", ["tiercache.toml", "not TOML", "tiercache config"]),
        ({}, {"TIERCACHE_CONFIG": "/nowhere.toml"}, "", ["/nowhere.toml", "No such file"]),
    ],
)
def test_errors_name_key_value_source_and_remedy(
    tmp_path: Path, flags: dict[str, object], env: dict[str, str], text: str, words: list[str]
) -> None:
    path = write(tmp_path, text) if text else None
    with pytest.raises(ConfigError) as caught:
        load_config(path, env, flags)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("word", "is_on"),
    [(word, True) for word in ("yes", "true", "True", "on", "1", True)]
    + [(word, False) for word in ("no", "false", "False", "off", "0", False)],
)
def test_switches_take_the_same_words_from_everywhere(tmp_path: Path, word: str | bool, is_on: bool) -> None:
    text = f'"{word}"' if isinstance(word, str) else str(word).lower()
    for key in ("http_allow_remote", "what_if"):
        assert getattr(load_config(write(tmp_path, f"{key} = {text}"), {}), key) is is_on
        assert getattr(load_config(None, {f"TIERCACHE_{key.upper()}": str(word)}), key) is is_on
        assert getattr(load_config(None, {}, {key: word}), key) is is_on


@given(arena=st.integers(2 * MIB, 1 << 42), region=st.integers(1, 1 << 12))
def test_any_arena_is_covered_by_few_enough_regions(arena: int, region: int) -> None:
    config = DaemonConfig(run_dir=Path("/x"), arena_bytes=arena, region_bytes=region * 2 * MIB)
    sizes = config.region_sizes()
    assert sum(sizes) == config.arena_bytes
    assert 0 <= arena - config.arena_bytes < 2 * MIB
    assert len(sizes) <= MAX_REGIONS
    assert all(size % (2 * MIB) == 0 and size > 0 for size in sizes)


configs = st.builds(
    DaemonConfig,
    run_dir=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40).map(
        lambda text: Path("/run", text.lstrip("/"))
    ),
    arena_bytes=st.integers(2 * MIB, 1 << 40),
    region_bytes=st.integers(1, 4096).map(lambda n: n * 2 * MIB),
    lock_memory=st.sampled_from(["auto", "off", "require"]),
    lease_ttl_max_s=st.floats(0.1, 600),
    quarantine_per_client_bytes=st.integers(0, 1 << 40),
    pin_share=st.floats(0, 1).map(lambda value: round(value, 6)),
)


@given(config=configs)
def test_the_printed_file_reads_back_as_equal(tmp_path_factory: pytest.TempPathFactory, config: DaemonConfig) -> None:
    path = tmp_path_factory.getbasetemp() / "printed.toml"
    for comments in (True, False):
        path.write_text(render_toml(config, comments))
        assert load_config(path, {}, {}) == config, f"with comments={comments}"


def test_daemon_and_client_come_to_the_same_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_run_dir({"TIERCACHE_RUN_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}) == Path("/a")
    assert default_run_dir({"XDG_RUNTIME_DIR": "/b"}) == Path("/b/tiercache")
    assert default_run_dir({}).parts[1] in ("run", "tmp")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert default_run_dir({}) == Path("/tmp/tiercache-1234")
    monkeypatch.setenv("TIERCACHE_RUN_DIR", str(tmp_path))
    assert default_address() == str(load_config().run_dir) == str(tmp_path)


def test_socket_paths_have_a_limit() -> None:
    assert session_socket_path("/run/tiercache") == Path("/run/tiercache/session.sock")
    assert control_endpoint("/run/tiercache") == "ipc:///run/tiercache/control.sock"
    longest = "/" + "é" * 46 + "x"  # 2 bytes each in UTF-8
    assert len(os.fsencode(session_socket_path(longest))) == MAX_SOCKET_PATH_BYTES
    with pytest.raises(ConfigError, match=r"run_dir = /x+: session\.sock .* 109 bytes.*107.*shorter"):
        session_socket_path("/" + "x" * 95)


@pytest.mark.parametrize(
    ("nvme", "shares", "whole"),
    [
        ("/mnt/a:2TiB, /mnt/b ,/mnt/c", [2 << 40, 1 << 39, 1 << 39], 3 << 40),
        ("/mnt/a:2TiB,/mnt/b:512GiB", [2 << 40, 1 << 39], (2 << 40) + (1 << 39)),
        ("/a,/b", [1 << 39, 1 << 39], 1 << 40),
        ("/dev/disk/by-path/pci-0000:01:00.0/kv", [1 << 40], 1 << 40),
        ("", [], 0),
    ],
)
def test_nvme_directories_may_have_sizes_of_their_own(nvme: str, shares: list[int], whole: int, tmp_path: Path) -> None:
    config = load_config(env={}, flags={"nvme": nvme, "nvme_size": "1TiB"} if nvme else {})
    assert list(config.nvme_shares().values()) == shares
    assert config.nvme_capacity_bytes == whole
    assert load_config(write(tmp_path, render_toml(config, comments=False)), env={}) == config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"arena": "8MiB", "headroom": "6MiB"}, "more than half of arena"),
        ({"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "tcp://127.0.0.1:5557"}, "is that of kv_events"),
        ({"kv_events_topic": "kv"}, "mean nothing without kv_events"),
        ({"kv_events_replay": "tcp://127.0.0.1:5558"}, "mean nothing without kv_events"),
        ({"kv_events": "tcp://0.0.0.0:5557"}, "--kv-events-allow-remote yes"),
        ({"kv_events": "tcp://127.0.0.1:0"}, "is not an address to bind"),
        ({"kv_events": "tcp://10.1.2.3:5557"}, "other hosts could read the tokens"),
        ({"kv_events": "tcp://*:5557"}, r"use 127\.0\.0\.1 or ipc://"),
        ({"kv_events": "ipc:///r", "kv_events_replay": "tcp://*:5558"}, "other hosts could read the tokens"),
        ({"kv_events": "127.0.0.1:5557"}, r"tcp://127\.0\.0\.1:5557"),
        ({"kv_events": "tcp://localhost:5557"}, r"tcp://127\.0\.0\.1:5557"),
        ({"kv_events": "inproc://here"}, "ipc:// and the path"),
        ({"kv_events": "ipc:///" + "x" * 200}, "ipc:// and the path"),
        ({"kv_events": "tcp://epp.llm-d:5557"}, "is not an address to bind"),
        ({"kv_events": "tcp://epp.llm-d:5557", "kv_events_connect": "yes"}, "--kv-events-allow-remote yes"),
        ({"kv_events": "tcp://*:5557", "kv_events_connect": "yes"}, "is not an address to connect to"),
        ({"kv_events": "tcp://[::]:5557", "kv_events_connect": "yes"}, "is not an address to connect to"),
        ({"kv_events": "tcp://a_b:5557", "kv_events_connect": "yes"}, "is not an address"),
        ({"kv_events_connect": "yes"}, "mean nothing without kv_events"),
        ({"kv_events": "ipc:///r", "kv_events_buffer": "0"}, "1 to 1000000"),
        ({"listen": "tcp://0.0.0.0:7411"}, "TCP is served with keys only"),
        ({"curve_keys": "/keys"}, "TCP is served with keys only"),
        ({"listen": "tcp://0.0.0.0:0", "curve_keys": "/keys"}, "is not an address to serve at"),
        ({"http": "0.0.0.0:8181"}, "other hosts could read the statistics there.*--http-allow-remote yes"),
        ({"http": "::1:8181"}, r"is not a host and port: write for example 127\.0\.0\.1:8181"),
        ({"http": "127.0.0.1:65536"}, "is not a host and port"),
        ({"http": "127.0.0.1:\uff18\uff11"}, "is not a host and port"),
        ({"http_hosts": "cache.local,cache:80"}, "'cache:80' is not a host: write names without port"),
        ({"http_hosts": "a,,b"}, "is not a host: write names without port"),
        ({"http_hosts": "::1"}, "is not a host: write names without port"),
        ({"nvme": "/a,/b,/a"}, "names a directory twice"),
        ({"nvme": "/a:1TiB,/a:2TiB"}, "names a directory twice"),
        ({"nvme": "/a:1KiB"}, "the size of a directory must be"),
        ({"nvme": "/a:2Tirb"}, "'/a:2Tirb' has no size behind its colon: write for example /mnt/nvme0/kv:2TiB"),
        ({"nvme": "/a:0"}, "'/a:0' has a size of 0: leave out the directory, or the size"),
        ({"record_max": "1k"}, "record_max"),
    ],
)
def test_settings_that_cannot_work_together_or_would_let_others_in(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {}, flags)


def test_the_schema_is_that_of_the_settings() -> None:
    text = SCHEMA.read_text()
    again = "python -m tiercache.config.settings_schema daemon/deploy/helm/tiercache/values.schema.json"
    assert written_into(text) == text, f"write it again: {again}"
    named = set(json.loads(text)["properties"]["settings"]["properties"])
    assert named | set(OF_THE_CHART) == set(SETTINGS)
    assert not named & set(OF_THE_CHART)


@pytest.mark.parametrize("password", ["open-sesame", "with/slash", "with@sign", "with:colon", "p@s/s:w?rd#"])
@pytest.mark.parametrize("user", ["", "cache"])
def test_no_password_of_a_store_is_ever_shown(password: str, user: str) -> None:
    url = f"valkey://{user}:{password}@kv:6379"
    good = {"TIERCACHE_SHARED": url, "TIERCACHE_SHARED_PLAIN": "yes"}
    config = load_config(env=good)
    assert config.shared.full == url
    shown = [render_toml(config), repr(config), str(config.shared), f"{config.shared}"]
    wrong: list[tuple[dict[str, str], dict[str, str]]] = [
        ({**good, f"TIERCACHE_{key}": value}, {})
        for key, value in (("SHARED_PLAIN", "no"), ("SHARED_KEY", "/k"), ("ARENA", "lots"))
    ]
    wrong += [({"TIERCACHE_SHARD": url}, {}), *(({}, {key: url}) for key in ("shard", "kv_events", "http"))]
    for env, flags in wrong:
        with pytest.raises(ConfigError) as refused:
            load_config(env=env, flags=flags)
        shown.append(str(refused.value))
    assert [text for text in shown if password in text] == []
    assert f"valkey://{user}:***@kv:6379" in shown[0]


def test_a_printed_file_is_not_taken_for_a_store_without_password(tmp_path: Path) -> None:
    config = load_config(env={"TIERCACHE_SHARED": "valkey://:secret@kv", "TIERCACHE_SHARED_PLAIN": "yes"})
    path = write(tmp_path, render_toml(config, comments=False))
    with pytest.raises(ConfigError, match="was printed without its password: write the password, or set TIERCACHE_"):
        load_config(path, env={})
    with pytest.raises(ConfigError, match=r"shard = valkey://:\*\*\*@kv .*no such setting"):
        load_config(write(tmp_path, 'shard = "valkey://:secret@kv"\n'), env={})
