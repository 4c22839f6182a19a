"""`tiercache doctor` as tables: what a host, a disk, a daemon, its figures and its shared store are like."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run
from valkey_rig import ValkeyServer
from waiting import wait_until

import tiercache
from tiercache.cli.doctor import daemon, disk, gpu, hits
from tiercache.cli.doctor import host as host_checks
from tiercache.cli.doctor import store as doctor_store
from tiercache.cli.doctor.findings import Finding, Host, Needs, State, collect, limit_of
from tiercache.cli.doctor.store import Prefill, examine
from tiercache.cli.exit_status import EXIT_UNWELL
from tiercache.cli.main import main
from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import StoreUrl
from tiercache.copies.arena import Beside
from tiercache.http.families import COUNTERS

GIB = 1 << 30
NEEDS = Needs(4 * GIB, "auto", 2000, (), 64 * GIB)
GOOD = {
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n",
    "proc/self/limits": "Max locked memory  unlimited  unlimited  bytes\nMax open files  1024  524288  files\n",
    "proc/self/status": "CapEff:\t0000000000000000\n",
    "proc/self/cgroup": "0::/pod/me\n",
    "sys/fs/cgroup/pod/me/memory.max": "max\n",
    "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/pod/me/cpu.max": "max 100000\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [within_size] advise never",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
}
"""Files of a host on which all is well; cases spoil one thing each."""
FIRST_CGROUPS = {
    "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(GIB),
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
}
ODD, FINE = {"name": "odd", "broken_chains": 7}, {"name": "fine", "broken_chains": 0}
LITTLE_LOCKED = {"proc/self/limits": "Max locked memory  65536  65536  bytes\n"}
LITTLE_MEMORY = {"proc/meminfo": "MemAvailable: 1024 kB\n"}


def host_with(folder: Path, files: dict[str, str]) -> Host:
    for name, text in (GOOD | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(folder / "proc", folder / "sys")


def look(host: Host, needs: Needs = NEEDS) -> dict[str, Finding]:
    return {one.name: one for one in host_checks.examine(host, needs)}


@pytest.mark.parametrize(
    ("files", "needs", "name", "state", "figure"),
    [
        ({}, {}, "cgroup memory", "ok", "8.0 GiB, the daemon needs 4.1 GiB"),
        ({}, {"beside": Beside(workers=4, http=True)}, "cgroup memory", "ok", "8.0 GiB, the daemon needs 4.3 GiB"),
        ({"sys/fs/cgroup/pod/memory.max": str(2 * GIB)}, {}, "cgroup memory", "failure", "2.0 GiB for 4.1 GiB"),
        (FIRST_CGROUPS, {}, "cgroup memory", "failure", "1.0 GiB for 4.1 GiB"),
        (FIRST_CGROUPS, {}, "processors", "ok", ""),
        (LITTLE_MEMORY, {}, "memory", "failure", "1.0 MiB available"),
        (LITTLE_MEMORY, {"pid": 1}, "memory", "ok", "besides the arena"),
        (LITTLE_LOCKED, {}, "memlock", "warning", "64.0 KiB"),
        (LITTLE_LOCKED, {"lock_memory": "require"}, "memlock", "failure", "64.0 KiB"),
        (LITTLE_LOCKED, {"lock_memory": "off"}, "memlock", "not applicable", "lock_memory is off"),
        ({**LITTLE_LOCKED, "proc/self/status": "CapEff: 4000\n"}, {}, "memlock", "ok", "no limit"),
        ({"proc/self/limits": "Max open files  256  1024  files\n"}, {}, "descriptors", "warning", "1,024, the daemon"),
        ({"sys/fs/cgroup/pod/me/cpu.max": "50000 100000"}, {}, "processors", "warning", "a cgroup gives 0.5"),
        ({"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}, {}, "clock", "warning", "hpet"),
        ({"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [never]"}, {}, "huge pages", "ok", "4 KiB"),
    ],
)
def test_what_is_said_of_a_host(
    tmp_path: Path, files: dict[str, str], needs: dict[str, Any], name: str, state: str, figure: str
) -> None:
    one = look(host_with(tmp_path, files), replace(NEEDS, **needs))[name]
    assert one.state.value == state
    assert figure in one.figure
    assert bool(one.remedy) is (state in ("warning", "failure")), "what is not well has a remedy, and nothing else"


def test_a_call_that_the_kernel_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert look(host_with(tmp_path, {}), NEEDS)["system calls"].state is State.OK
    monkeypatch.setattr(os, "memfd_create", refuse)
    one = look(host_with(tmp_path / "again", {}), NEEDS)["system calls"]
    assert (one.state, one.figure) == (State.FAILURE, "the kernel refuses memfd_create (Operation not permitted)")
    assert one.remedy.startswith("allow it in the seccomp profile")


def test_a_check_that_fails_is_a_finding_itself() -> None:
    def broken_check() -> list[Finding]:
        raise PermissionError(13, "no")

    [one] = collect("host", [broken_check])
    assert (one.name, one.state) == ("broken check", State.WARNING)
    assert limit_of("Max open files  7 unlimited files", "Max open files") == (7, None)
    assert limit_of("", "Max open files") == (None, None)


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MEASURED_BYTES", 4 << 20)
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    needs = replace(NEEDS, nvme_bytes=1 << 20)
    found = {one.name.removeprefix(str(folder)).strip(): one for one in disk.examine(needs, (folder,), True)}
    assert (found["mode"].state, found["mode"].figure) == (State.WARNING, "mode 0755")
    assert found["room"].state is State.OK
    assert "/s written, " in found["speed"].figure
    assert list(folder.iterdir()) == []
    folder.chmod(0o1777)  # as /tmp
    remedies = {one.name: one.remedy for one in disk.examine(needs, (folder,), measure=False)}
    assert remedies[f"{folder} mode"].startswith(f"name a folder in it, as {folder}/")
    folder.chmod(0o1755)
    remedies = {one.name: one.remedy for one in disk.examine(needs, (folder,), measure=False)}
    assert remedies[f"{folder} mode"].startswith(f"chmod 0700 {folder}")
    missing = disk.examine(replace(needs, nvme_bytes=1 << 60), (tmp_path / "new",), measure=False)
    states = [(one.name.rsplit(" ", 1)[-1], one.state.value) for one in missing]
    assert states == [("room", "warning"), ("speed", "not applicable")]


def test_a_disk_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    end = threading.Event()

    def hang(folder: Path) -> disk.Speed:
        end.wait(60)
        return disk.Speed(1, 1, True)

    monkeypatch.setattr(disk, "ANSWER_S", 0.05)
    monkeypatch.setattr(disk, "measure_speed", hang)
    [one] = disk.examine(NEEDS, (tmp_path,), measure=True)
    end.set()
    assert (one.state, "does not answer within" in one.figure) == (State.FAILURE, True)


def test_who_may_enter_the_run_dir(tmp_path: Path) -> None:
    (tmp_path / "session.sock").touch(0o666)
    tmp_path.chmod(0o755)
    states = {one.name: one.state for one in daemon.examine(tmp_path, {}, "it is silent")}
    assert states["running"] is State.FAILURE, "a socket, and no daemon behind it"
    assert states[f"mode of {tmp_path.name}"] is State.FAILURE
    tmp_path.chmod(0o1777)
    remedies = {one.name: one.remedy for one in daemon.examine(tmp_path, {}, "")}
    assert remedies[f"mode of {tmp_path.name}"].startswith("name a folder in it as run_dir")
    for mode in (0o700, 0o1700, 0o2750):
        tmp_path.chmod(mode)
        assert f"mode of {tmp_path.name}" not in {one.name for one in daemon.examine(tmp_path, {}, "")}
    assert [one.name for one in daemon.examine(tmp_path / "none", {}, "") if one.remedy] == []


def test_to_another_user_the_rest_is_said_and_the_daemon_is_named(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter everywhere, so the system's answer is played."""
    stat, connect = os.stat, socket.socket.connect

    def check(path: object) -> None:
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def stat_or_refuse(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        check(path)
        return stat(path, *rest, **options)

    def connect_or_refuse(sock: socket.socket, address: Any) -> None:
        check(address)
        connect(sock, address)

    monkeypatch.setattr(os, "stat", stat_or_refuse)
    monkeypatch.setattr(socket.socket, "connect", connect_or_refuse)
    status, out, err = run("doctor", "--quick", "--address", tmp_path)
    assert (status, err) == (EXIT_UNWELL, "")
    assert "# host" in out
    assert f"{tmp_path} may not be entered by this user" in out
    assert "run this as the daemon's user" in out
    status, _, err = run("ping", "--address", tmp_path)
    assert (status, "may not be entered: run this as the daemon's user" in err) == (EXIT_UNWELL, True)


def test_a_client_whose_keys_are_not_chains_is_named(tmp_path: Path) -> None:
    tree = {
        "daemon": {"pid": 1, "uptime_s": 1},
        "health": {},
        "counters": dict.fromkeys(COUNTERS, 0),
        "sessions": [ODD, FINE],
    }
    [found] = [one for one in daemon.examine(tmp_path, tree, "") if one.name == "chains"]
    assert (found.state, found.figure) == (State.WARNING, "lists of keys that are not chains: odd (7)")


def space(number: int, asked: int = 0, hit: int = 0, stored: int = 0, engine: str = "e") -> dict[str, Any]:
    blocks = {"asked_blocks": asked, "hit_blocks": hit, "stored_blocks": stored, "blocks": stored}
    return {"id": number, "engine": engine, **blocks}


def spec(**changed: Any) -> tiercache.NamespaceSpec:
    fields = {"engine": "e", "layout": "l", "dtype": "bfloat16", "block_size": 16, "block_bytes": 4096, **changed}
    return tiercache.NamespaceSpec(**fields)


def told_of(spaces: list[dict[str, Any]], specs: Any = None, tiers: Any = None, **counters: int) -> str:
    tree = {"daemon": {"uptime_s": 100}, "arena": {"bytes": GIB}, "namespaces": spaces, "counters": counters}
    found = hits.examine(tree | {"tiers": tiers or {}}, specs or {})
    return "\n".join(f"{one.state.value}: {one.name}: {one.figure} -> {one.remedy}" for one in found)


EVICTED = {"stored_blocks": 4000, "evicted_blocks": 3000}
POPULATING = {"refused_blocks": 7, "refused_populating_blocks": 7}
OVER_QUOTA = {"refused_blocks": 7, "refused_by_quota_blocks": 7}


@pytest.mark.parametrize(
    ("spaces", "counters", "words"),
    [
        ([], {}, "no engine has registered"),
        ([space(1, asked=9, engine="tiercache/probe")], {}, "no engine has registered"),
        ([space(1)], {}, "no prompt of a full block has come"),
        ([space(1, stored=5)], {}, "the engine only stores"),
        ([space(1, asked=9)], {"refused_blocks": 7}, "nothing stored; 7 blocks found no room"),
        ([space(1, asked=9)], POPULATING, "the arena is still being populated: 0 B of 1.0 GiB so far -> wait"),
        ([space(1, asked=9, hit=3)], POPULATING, "ok: stores at the start: 7 blocks refused"),
        ([space(1, asked=9)], {}, "is it a producer"),
        ([space(1, asked=9, stored=5)], {}, "under other keys"),
        ([space(1, asked=9, hit=3)], {}, "ok: hit rate: 33.3% of 9 blocks"),
        ([space(1, asked=9, hit=3)], OVER_QUOTA, "quotas: blocks refused: 7 in DRAM, 0 on NVMe"),
        ([space(1, asked=9, hit=1)], {**EVICTED, "stored_bytes": 100 * GIB}, "DRAM holds the last 1.00 s of stores"),
        ([space(1, asked=9, hit=1)], {**EVICTED, "stored_bytes": GIB}, "ok: evictions"),
    ],
)
def test_why_there_are_no_hits(spaces: list[dict[str, Any]], counters: dict[str, int], words: str) -> None:
    told = told_of(spaces, **counters)
    assert words in told
    assert ("found no room" in told) == ("found no room" in words), "what quotas refuse is said only once"


def test_a_flush_that_a_store_was_not_told_of_is_told() -> None:
    shared = {"lookups": 0, "lookups_late": 0, "bad_blocks": 0, "flushes_waiting": 2, "flush_tries": 5}
    assert "flush not told yet: 2 notes wait after 5 tries" in told_of(
        [space(1, asked=9, hit=3)], tiers={"shared": shared}
    )
    assert "not told" not in told_of([space(1, asked=9, hit=3)], tiers={"shared": {**shared, "flushes_waiting": 0}})


@pytest.mark.parametrize(("evicted", "used", "told"), [(9332, 1, True), (9332, 90, False), (3, 1, False)])
def test_a_directory_that_evicts_beside_an_empty_one_is_told(evicted: int, used: int, told: bool) -> None:
    rows = [
        {"path": "/full", "evicted_blocks": evicted, "used_bytes": 99, "capacity_bytes": 100},
        {"path": "/new", "evicted_blocks": 0, "used_bytes": used, "capacity_bytes": 100},
    ]
    found = told_of([space(1, asked=9, hit=3)], tiers={"nvme": {"directories": rows}})
    assert ("/full evicted 9,332 blocks, /new is nearly empty" in found) is told


def test_without_a_daemon(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCACHE_ARENA", "16MiB")
    status, out, _ = run("doctor", "--quick", "--address", tmp_path / "none")
    assert (status, out.startswith("# host\n"), "not applicable  running" in out) == (0, True, True)
    monkeypatch.setenv("TIERCACHE_ARENA", "1TiB")
    status, out, _ = run("doctor", "--quick", "--json", "--address", tmp_path / "none")
    tree = json.loads(out)
    assert (status, tree["ok"]) == (1, False)
    failed = [one for one in tree["findings"] if one["state"] == "failure"]
    assert "memory" in failed[0]["name"]
    assert failed[0]["remedy"]


def test_cuda_is_tried_in_a_process_of_its_own() -> None:
    """Without a driver there is nothing to look at, which is no failure."""
    [one] = gpu.examine()
    assert one.state in (State.OK, State.NOT_APPLICABLE), one


def test_with_a_daemon(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MEASURED_BYTES", 2 << 20)
    monkeypatch.setattr(disk, "ANSWER_S", 60.0)
    monkeypatch.setattr(gpu, "examine", list)
    pool = tiercache.Pool.from_blocks(np.zeros((8, 4096), np.uint8))
    chain = tiercache.KeyChain(tiercache.root_key("m"), 16, range(128)).packed()
    settings: dict[str, Any] = {"nvme": str(tmp_path / "kv"), "nvme_size": "64MiB", "nvme_segment": "8MiB"}
    with tiercache.launch("4MiB", **settings) as launched:
        asks = tiercache.connect(launched.address, namespace=spec(), pool=pool, required=True, request_timeout_s=60.0)
        stores = tiercache.connect(
            launched.address, namespace=spec(dtype="float16"), pool=pool, required=True, request_timeout_s=60.0
        )
        with asks, stores:
            stats = asks.client.stats
            wait_until(lambda: stats()["tiers"]["nvme"]["directories"][0]["state"] == "ok", "the directory is open")
            asks.match(chain)
            stores.store(chain, list(range(8)))
        status, out, _ = run("doctor", "--json", "--address", launched.address)
    found = {one["name"]: one for one in json.loads(out)["findings"]}
    assert (status, found["running"]["state"], found["versions"]["state"]) == (0, "ok", "ok")
    assert "they differ in dtype (bfloat16 and float16)" in found["namespaces"]["figure"]
    assert "/s read" in found[f"{tmp_path / 'kv'} speed"]["figure"]
    assert found["modes"]["figure"].endswith("session.sock 0600, control.sock 0600")


# --- a shared store: a good one, one that is away, one that lies -------------------------------------


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


def look_at(config: DaemonConfig, measure: bool = True) -> dict[str, Finding]:
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
    found = look_at(config)
    assert [one.state for one in found.values() if one.name not in ("a hit pays", "no hit pays")] == [State.OK] * 3
    assert ("encrypted" if sealed else "in plain") in found[valkey.url].figure
    assert "fetched on 4 connections" in found["speed"].figure
    assert valkey.ask("DBSIZE") == b":0"
    assert look_at(config, measure=False)["speed"].state is State.NOT_APPLICABLE


def only(found: dict[str, Finding]) -> Finding:
    [one] = found.values()
    assert one.state is State.FAILURE
    assert one.remedy
    assert "\n" not in one.figure + one.remedy
    return one


def test_one_that_is_away_or_refuses_us_is_one_line(valkey: ValkeyServer) -> None:
    with ValkeyServer() as other:
        gone = other.url
    assert "Connection refused" in only(look_at(config_of(gone))).figure
    refused = only(look_at(config_of(valkey.url.replace("://", "://:open-sesame@"))))
    assert "open-sesame" not in refused.figure + refused.remedy
    assert "no kind of store is called 'tape'" in only(look_at(config_of("tape://robot"))).figure
    missing = only(look_at(config_of(valkey.url, shared_key=Path("/nonexistent/key"))))
    assert "shared_key" in missing.figure


def test_one_that_gives_other_bytes_is_found_out(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor_store._Trial._put

    def put_and_spoil(trial: Any) -> None:
        real(trial)
        valkey.ask("SETRANGE", trial._name, 5000, "spoilt")

    monkeypatch.setattr(doctor_store._Trial, "_put", put_and_spoil)
    assert only(look_at(config_of(valkey.url))).figure == "fetching a block: other bytes came back than were sent"
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
