"""Settings: where they come from, what they refuse, and that the printed file reads back."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.config import daemon_config as config_module
from tiercache.config.daemon_config import (
    DaemonConfig,
    add_config_flags,
    control_endpoint,
    default_address,
    default_run_dir,
    flags_from_args,
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
SCHEMA = Path(__file__).parents[1] / "daemon" / "deploy" / "helm" / "tiercache" / "values.schema.json"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tiercache.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    config = load_config(None, {"TIERCACHE_RUN_DIR": "/x"}, {})
    assert (config.run_dir, config.arena_bytes, config.region_bytes) == (Path("/x"), 4 * GIB, 256 * MIB)
    assert config.quarantine_per_client_bytes == GIB
    assert (config.max_sessions, config.max_leases_per_session, config.lease_ttl_max_s) == (256, 1024, 60.0)
    assert (config.policy, config.lock_memory, config.pin_share) == ("hazard", "auto", 0.5)
    assert config.region_sizes() == [256 * MIB] * 16


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'arena = "1GiB"\nmax_sessions = 7\npin_share = 0.25\n')
    env = {"TIERCACHE_ARENA": "2GiB", "TIERCACHE_MAX_SESSIONS": "8", "TIERCACHE_CONFIG": "/nowhere.toml"}
    config, sources = resolve_config(path, env, {"arena": "3GiB", "policy": None})
    assert (config.arena_bytes, config.max_sessions, config.pin_share) == (3 * GIB, 8, 0.25)
    assert sources["arena"] == "--arena"
    assert sources["max_sessions"] == "TIERCACHE_MAX_SESSIONS"
    assert sources["pin_share"] == str(path)
    assert sources["policy"] == "default"


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "arena = 1048576000\n")
    assert load_config(None, {"TIERCACHE_CONFIG": str(path)}).arena_bytes == 1000 * MIB


@pytest.mark.parametrize(
    ("flags", "env", "text", "words"),
    [
        ({"arena": "lots"}, {}, "", ["arena = lots", "--arena", "16GiB"]),
        ({}, {"TIERCACHE_ARENA": "16Gb i"}, "", ["arena", "16Gb i", "TIERCACHE_ARENA", "write for example"]),
        ({}, {}, 'arena = "1KiB"', ["arena", "1KiB", "tiercache.toml", '"2MiB" to "64TiB"']),
        ({"region": "3MiB"}, {}, "", ["region", "3MiB", "--region", "4MiB"]),
        ({"region": 0}, {}, "", ["region", "2MiB"]),
        ({"pin_share": "1.5"}, {}, "", ["pin_share", "1.5", "0 to 1"]),
        ({"pin_share": "nan"}, {}, "", ["pin_share", "nan", "0 to 1"]),
        ({"pin_share": "half"}, {}, "", ["pin_share", "half", "0.5"]),
        ({"max_sessions": "0"}, {}, "", ["max_sessions", "0", "1 to 4096"]),
        ({"max_sessions": "many"}, {}, "", ["max_sessions", "many", "whole number"]),
        ({"lease_ttl_max": "2h"}, {}, "", ["lease_ttl_max", "2h", "--lease-ttl-max", "600s"]),
        ({"log_level": "loud"}, {}, "", ["log_level", "loud", "debug, info, warning, error"]),
        ({}, {}, 'policy = "best"', ["policy", "tiercache.toml", "must be one of: lru, hazard"]),
        ({}, {}, 'policy = "workload-aware"', ["tiercache.toml", "policy", "must be one of: lru, hazard"]),
        ({"arena": "9" * 400}, {}, "", ["arena", "--arena"]),
        ({"run_dir": ""}, {}, "", ["run_dir", "--run-dir", "path"]),
        ({}, {}, "lock_memory = true", ["lock_memory", "True", "auto, off, require"]),
        ({}, {}, "arena = true", ["arena", "True", "bool"]),
        ({}, {}, 'what_if = "maybe"', ["what_if", "maybe", "yes or no"]),
        ({}, {}, "what_if = 2", ["what_if", "2", "yes or no"]),
        ({}, {}, "arena = [1]", ["arena", "list"]),
        ({}, {}, 'arean = "1GiB"', ["arean", "tiercache.toml", "did you mean arena?"]),
        ({}, {}, "[daemon]\narena = 1", ["daemon", "no such setting"]),
        ({}, {"TIERCACHE_AREAN": "1GiB"}, "", ["TIERCACHE_AREAN", "1GiB", "did you mean TIERCACHE_ARENA?"]),
        ({"max_session": 3}, {}, "", ["max_session", "did you mean max_sessions?"]),
        ({}, {}, "arena = ", ["tiercache.toml", "not TOML", "tiercache config"]),
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


@pytest.mark.parametrize("word", ["yes", "true", "True", "on", "1", True])
def test_switches_take_yes_and_true_from_everywhere(tmp_path: Path, word: str | bool) -> None:
    text = "true" if word is True else f'"{word}"'
    assert load_config(write(tmp_path, f"http_allow_remote = {text}"), {}).http_allow_remote is True
    assert load_config(None, {"TIERCACHE_HTTP_ALLOW_REMOTE": str(word)}).http_allow_remote is True
    assert load_config(None, {}, {"http_allow_remote": word}).http_allow_remote is True


@pytest.mark.parametrize("word", ["no", "false", "False", "off", "0", False])
def test_switches_take_no_and_false_from_everywhere(tmp_path: Path, word: str | bool) -> None:
    text = "false" if word is False else f'"{word}"'
    assert load_config(write(tmp_path, f"what_if = {text}"), {}).what_if is False
    assert load_config(None, {"TIERCACHE_WHAT_IF": str(word)}).what_if is False
    assert load_config(None, {}, {"what_if": word}).what_if is False


def test_false_is_off_where_there_is_an_off(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "lock_memory = false"), {}).lock_memory == "off"
    assert load_config(None, {"TIERCACHE_LOCK_MEMORY": "false"}).lock_memory == "off"


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.toml.*No such file.*--config"):
        load_config("/nowhere.toml", {})


def test_variables_that_kubernetes_sets_are_left_alone() -> None:
    from_kubernetes = {"TIERCACHE_PORT": "tcp://10.0.0.1:80", "TIERCACHE_SERVICE_HOST": "10.0.0.1"}
    assert load_config(None, {**from_kubernetes, "TIERCACHE_ARENA": "1GiB"}).arena_bytes == GIB


def test_regions_are_fitted_to_the_arena() -> None:
    assert DaemonConfig(arena_bytes=8 * MIB).region_sizes() == [8 * MIB]
    assert DaemonConfig(arena_bytes=7 * MIB, region_bytes=4 * MIB).region_sizes() == [4 * MIB, 2 * MIB]
    large = DaemonConfig(arena_bytes=1 << 40)
    assert len(large.region_sizes()) == MAX_REGIONS
    assert sum(large.region_sizes()) == 1 << 40


@given(arena=st.integers(2 * MIB, 1 << 42), region=st.integers(1, 1 << 12))
def test_any_arena_is_covered_by_few_enough_regions(arena: int, region: int) -> None:
    config = DaemonConfig(run_dir=Path("/x"), arena_bytes=arena, region_bytes=region * 2 * MIB)
    sizes = config.region_sizes()
    assert sum(sizes) == config.arena_bytes
    assert 0 <= arena - config.arena_bytes < 2 * MIB
    assert len(sizes) <= MAX_REGIONS
    assert all(size % (2 * MIB) == 0 and size > 0 for size in sizes)


def test_an_object_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"region = 5: .*2MiB"):
        DaemonConfig(region_bytes=5)


configs = st.builds(
    DaemonConfig,
    run_dir=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40).map(
        lambda text: Path("/run", text.lstrip("/"))
    ),
    arena_bytes=st.integers(2 * MIB, 1 << 40),
    region_bytes=st.integers(1, 4096).map(lambda n: n * 2 * MIB),
    lock_memory=st.sampled_from(["auto", "off", "require"]),
    max_sessions=st.integers(1, 4096),
    lease_ttl_max_s=st.floats(0.1, 600),
    quarantine_per_client_bytes=st.integers(0, 1 << 40),
    pin_share=st.floats(0, 1).map(lambda value: round(value, 6)),
    log_level=st.sampled_from(["debug", "info", "warning", "error"]),
)


@given(config=configs)
def test_the_printed_file_reads_back_to_an_equal_object(
    tmp_path_factory: pytest.TempPathFactory, config: DaemonConfig
) -> None:
    path = tmp_path_factory.getbasetemp() / "printed.toml"
    for comments in (True, False):
        path.write_text(render_toml(config, comments))
        assert load_config(path, {}, {}) == config, f"with comments={comments}"


def test_the_printed_file_teaches_and_says_where_values_came_from() -> None:
    config, sources = resolve_config(None, {"TIERCACHE_ARENA": "1GiB"}, {"pin_share": 0.5})
    text = render_toml(config, sources=sources)
    assert 'arena = "1GiB"  # from TIERCACHE_ARENA\n' in text
    assert "pin_share = 0.5  # from --pin-share\n" in text
    assert '\n#region = "256MiB"\n' in text
    for setting in SETTINGS.values():
        assert setting.doc.split()[0] in text


def test_flags_go_through_argparse() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    args = parser.parse_args(["--arena", "1GiB", "--lease-ttl-max", "5s", "--config", "a.toml"])
    assert flags_from_args(args) == {"arena": "1GiB", "lease_ttl_max": "5s"}
    assert args.config == "a.toml"
    text = " ".join(parser.format_help().split())
    assert [key for key in SETTINGS if config_module.flag_name(key) not in text] == []


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


# --- nvme directories --------------------------------------------------------------------------------


def test_nvme_directories_may_have_sizes_of_their_own() -> None:
    config = load_config(env={}, flags={"nvme": "/mnt/a:2TiB, /mnt/b ,/mnt/c", "nvme_size": "1TiB"})
    assert config.nvme_paths == (Path("/mnt/a"), Path("/mnt/b"), Path("/mnt/c"))
    assert list(config.nvme_shares().values()) == [2 << 40, 1 << 39, 1 << 39]
    assert config.nvme_capacity_bytes == 3 << 40
    all_sized = load_config(env={}, flags={"nvme": "/mnt/a:2TiB,/mnt/b:512GiB", "nvme_size": "1TiB"})
    assert all_sized.nvme_capacity_bytes == (2 << 40) + (1 << 39)
    assert load_config(env={}).nvme_capacity_bytes == 0
    assert 'nvme = "/mnt/a:2TiB,/mnt/b:512GiB"' in render_toml(all_sized, comments=False)
    by_path = load_config(env={}, flags={"nvme": "/dev/disk/by-path/pci-0000:01:00.0/kv"})
    assert by_path.nvme_paths == (Path("/dev/disk/by-path/pci-0000:01:00.0/kv"),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/mnt/a:2Tirb", "'/mnt/a:2Tirb' has no size behind its colon: write for example /mnt/nvme0/kv:2TiB"),
        ("/mnt/a:", "has no size behind its colon"),
        ("/mnt/a:0", "'/mnt/a:0' has a size of 0: leave out the directory, or the size"),
        ("/mnt/a:1MiB", "the size of a directory must be"),
        ("/mnt/a:1TiB,/mnt/a:2TiB", "names a directory twice"),
    ],
)
def test_nvme_sizes_that_are_none_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_config(env={}, flags={"nvme": text})


def test_the_schema_is_that_of_the_settings() -> None:
    text = SCHEMA.read_text()
    again = "python -m tiercache.config.settings_schema daemon/deploy/helm/tiercache/values.schema.json"
    assert written_into(text) == text, f"make it anew: {again}"
    named = set(json.loads(text)["properties"]["settings"]["properties"])
    assert named | set(OF_THE_CHART) == set(SETTINGS)
    assert not named & set(OF_THE_CHART)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"arena": "8MiB", "headroom": "6MiB"}, "more than half of arena"),
        ({"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "tcp://127.0.0.1:5557"}, "is that of kv_events"),
        ({"kv_events_topic": "kv"}, "mean nothing without kv_events"),
        ({"kv_events_replay": "tcp://127.0.0.1:5558"}, "mean nothing without kv_events"),
        ({"kv_events": "tcp://0.0.0.0:5557"}, "--kv-events-allow-remote yes"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": ""}, "is no address to bind|--kv-events-allow-remote yes"),
        ({"kv_events": "tcp://127.0.0.1:0"}, "is no address to bind"),
        ({"listen": "tcp://0.0.0.0:7411"}, "TCP is served with keys only"),
        ({"curve_keys": "/keys"}, "TCP is served with keys only"),
        ({"listen": "tcp://0.0.0.0:0", "curve_keys": "/keys"}, "is no address to serve at"),
        ({"http": "0.0.0.0:8181"}, "--http-allow-remote yes"),
        ({"http": "::1:8181"}, "is no host and port"),
        ({"http": "127.0.0.1:65536"}, "is no host and port"),
        ({"http_hosts": "cache.local,cache:80"}, "'cache:80' is no host"),
        ({"nvme": "/a,/b,/a"}, "names a directory twice"),
        ({"nvme": "/a:1KiB"}, "the size of a directory must be"),
    ],
)
def test_settings_that_cannot_work_together_or_would_let_others_in(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {}, flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"arena": "8MiB", "headroom": "4MiB"},
        {"kv_events": "tcp://0.0.0.0:5557", "kv_events_allow_remote": "yes"},
        {"listen": "tcp://0.0.0.0:7411", "curve_keys": "/keys"},
        {"http": "[::1]:8181", "http_hosts": "cache.local, [::1]"},
        {"http": "0.0.0.0:8181", "http_allow_remote": "yes"},
    ],
)
def test_settings_that_do_work_together(flags: dict[str, str]) -> None:
    load_config(None, {}, flags)


def test_what_all_directories_may_take() -> None:
    for nvme, whole in (("/a:1GiB,/b:2GiB", 3 * GIB), ("/a:1GiB,/b", 9 * GIB), ("/a,/b", 8 * GIB)):
        config = load_config(None, {}, {"nvme": nvme, "nvme_size": "8GiB"})
        assert config.nvme_capacity_bytes == whole == sum(config.nvme_shares().values())


def test_an_empty_word_of_the_environment_is_none() -> None:
    assert load_config(None, {"TIERCACHE_ARENA": "", "TIERCACHE_MAX_SESSIONS": ""}, {}).max_sessions == 256


# --- passwords ---------------------------------------------------------------------------------------

PASSWORDS = ["open-sesame", "with/slash", "with@sign", "with:colon", "p@s/s:w?rd#"]


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("user", ["", "cache"])
def test_no_password_of_a_store_is_ever_shown(password: str, user: str) -> None:
    url = f"valkey://{user}:{password}@kv:6379"
    config = load_config(env={"TIERCACHE_SHARED": url, "TIERCACHE_SHARED_PLAIN": "yes"})
    assert config.shared.full == url
    shown = [render_toml(config), repr(config), str(config.shared), f"{config.shared}"]
    for key, env in (("SHARED_PLAIN", "no"), ("SHARED_KEY", "/k"), ("ARENA", "lots")):
        with pytest.raises(ConfigError) as refused:
            load_config(env={"TIERCACHE_SHARED": url, "TIERCACHE_SHARED_PLAIN": "yes", f"TIERCACHE_{key}": env})
        shown.append(str(refused.value))
    for wrong in (
        {"env": {"TIERCACHE_SHARD": url}},
        {"env": {}, "flags": {"shard": url}},
        {"env": {}, "flags": {"kv_events": url}},
        {"env": {}, "flags": {"http": url}},
    ):
        with pytest.raises(ConfigError) as refused:
            load_config(**wrong)  # type: ignore[arg-type]
        shown.append(str(refused.value))
    assert [text for text in shown if password in text] == []
    assert f"valkey://{user}:***@kv:6379" in shown[0]


def test_a_printed_file_is_not_taken_for_a_store_without_password(tmp_path: Path) -> None:
    config = load_config(env={"TIERCACHE_SHARED": "valkey://:secret@kv", "TIERCACHE_SHARED_PLAIN": "yes"})
    path = tmp_path / "tiercache.toml"
    path.write_text(render_toml(config, comments=False))
    with pytest.raises(ConfigError, match="was printed without its password: write the password, or set TIERCACHE_"):
        load_config(path, env={})
    path.write_text('shard = "valkey://:secret@kv"\n')
    with pytest.raises(ConfigError, match=r"shard = valkey://:\*\*\*@kv .*no such setting"):
        load_config(path, env={})
