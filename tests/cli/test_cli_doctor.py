"""`tiercache doctor`: each check on hosts that are made up, and all of it on this one, with a daemon and without."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tiercache
from tiercache.cli.doctor import cuda as doctor_cuda
from tiercache.cli.doctor import daemon as doctor_daemon
from tiercache.cli.doctor import disk as doctor_disk
from tiercache.cli.doctor import hits as doctor_hits
from tiercache.cli.doctor import host as doctor_host
from tiercache.cli.doctor.findings import Finding, Host, Needs, State, collect, limit_of
from tiercache.cli.main import main
from tiercache.copies import cuda_driver

GIB = 1 << 30
NEEDS = Needs(4 * GIB, "auto", 2000, (), 64 * GIB)
STATES = {state.value for state in State}


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host on which all is well; tests spoil one thing each."""
    limits = "Max locked memory  unlimited  unlimited  bytes\nMax open files  1024  524288  files\n"
    put(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n",
            "proc/self/limits": limits,
            "proc/self/status": "CapEff:\t0000000000000000\n",
            "proc/self/cgroup": "0::/pod/me\n",
            "sys/fs/cgroup/pod/me/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/me/cpu.max": "max 100000\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [within_size] advise never",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        },
    )
    return Host(tmp_path / "proc", tmp_path / "sys")


def look(host: Host, needs: Needs = NEEDS) -> dict[str, Finding]:
    return {one.name: one for one in doctor_host.examine(host, needs)}


def test_a_good_host_has_no_remedies(host: Host) -> None:
    found = look(host)
    names = ("libraries", "memory", "memlock", "shared memory", "huge pages", "descriptors", "processors")
    assert [(name, found[name].remedy) for name in names if found[name].state is not State.OK] == []
    assert found["cgroup memory"].figure == "8.0 GiB, the daemon needs 4.1 GiB"
    with_workers = look(host, replace(NEEDS, workers=4))
    assert with_workers["cgroup memory"].figure == "8.0 GiB, the daemon needs 4.2 GiB"
    assert found["kernel"].state is not State.NOT_APPLICABLE
    assert {one.state.value for one in found.values()} <= STATES


def test_a_distribution_of_the_same_files_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor_host._version
    monkeypatch.setattr(doctor_host, "_version", lambda name: "0.1.13" if name == "tiercache" else real(name))
    found = look(host)["distribution"]
    assert found.state is State.WARNING
    assert "tiercache 0.1.13 is installed beside tiercache-kv" in found.figure
    monkeypatch.setattr(doctor_host, "_version", lambda name: "" if name == "tiercache" else real(name))
    assert "distribution" not in look(host)


@pytest.mark.parametrize(
    ("files", "needs", "name", "state", "figure"),
    [
        ({"sys/fs/cgroup/pod/memory.max": str(2 * GIB)}, {}, "cgroup memory", "failure", "2.0 GiB for 4.1 GiB"),
        ({"proc/meminfo": "MemAvailable: 1024 kB\n"}, {}, "memory", "failure", "1.0 MiB available"),
        ({"proc/meminfo": "MemAvailable: 1024 kB\n"}, {"pid": 1}, "memory", "ok", "besides the arena"),
        ({"proc/self/limits": "Max locked memory  65536  65536  bytes\n"}, {}, "memlock", "warning", "64.0 KiB"),
        (
            {"proc/self/limits": "Max locked memory  65536  65536  bytes\n"},
            {"lock_memory": "require"},
            "memlock",
            "failure",
            "64.0 KiB",
        ),
        (
            {"proc/self/limits": "Max locked memory  65536  65536  bytes\n"},
            {"lock_memory": "off"},
            "memlock",
            "not applicable",
            "lock_memory is off",
        ),
        (
            {"proc/self/limits": "Max locked memory  65536  65536  bytes\n", "proc/self/status": "CapEff: 4000\n"},
            {},
            "memlock",
            "ok",
            "no limit",
        ),
        ({"proc/self/limits": "Max open files  256  1024  files\n"}, {}, "descriptors", "warning", "1,024, the daemon"),
        ({"sys/fs/cgroup/pod/me/cpu.max": "50000 100000"}, {}, "processors", "warning", "a cgroup gives 0.5"),
        ({"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}, {}, "clock", "warning", "hpet"),
        ({"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [never]"}, {}, "huge pages", "ok", "4 KiB"),
    ],
)
def test_what_is_not_well_has_a_figure_and_a_remedy(
    host: Host, tmp_path: Path, files: dict[str, str], needs: dict[str, Any], name: str, state: str, figure: str
) -> None:
    put(tmp_path, files)
    one = look(host, replace(NEEDS, **needs))[name]
    assert one.state.value == state
    assert figure in one.figure
    assert bool(one.remedy) is (state in ("warning", "failure"))


def test_a_cgroup_of_the_first_kind_is_read_too(host: Host, tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
        },
    )
    assert doctor_host.memory_limit(host, NEEDS) == GIB
    assert look(host)["processors"].state is State.OK


def test_a_check_that_fails_is_a_finding_itself() -> None:
    def broken_check() -> list[Finding]:
        raise PermissionError(13, "no")

    [one] = collect("host", [broken_check])
    assert (one.name, one.state) == ("broken check", State.WARNING)
    assert limit_of("Max open files  7 unlimited files", "Max open files") == (7, None)
    assert limit_of("", "Max open files") == (None, None)


# --- disks -------------------------------------------------------------------------------------------


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_disk, "MEASURED_BYTES", 4 << 20)
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    needs = replace(NEEDS, nvme_bytes=1 << 20)
    found = {one.name.removeprefix(str(folder)).strip(): one for one in doctor_disk.examine(needs, (folder,), True)}
    assert (found["mode"].state, found["mode"].figure) == (State.WARNING, "mode 0755")
    assert found["room"].state is State.OK
    assert "/s written, " in found["speed"].figure
    assert list(folder.iterdir()) == []
    missing = doctor_disk.examine(replace(needs, nvme_bytes=1 << 60), (tmp_path / "new",), measure=False)
    assert [(one.name.rsplit(" ", 1)[-1], one.state.value) for one in missing] == [
        ("room", "warning"),
        ("speed", "not applicable"),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_of_another_user_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    [one] = doctor_disk.examine(NEEDS, (tmp_path / "kv",), measure=True)
    assert one.state is State.FAILURE


def test_a_disk_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    let_go = threading.Event()

    def hang(folder: Path) -> doctor_disk.Speed:
        let_go.wait(60)
        return doctor_disk.Speed(1, 1, True)

    monkeypatch.setattr(doctor_disk, "ANSWER_S", 0.05)
    monkeypatch.setattr(doctor_disk, "measure_speed", hang)
    [one] = doctor_disk.examine(NEEDS, (tmp_path,), measure=True)
    let_go.set()
    assert (one.state, "does not answer within" in one.figure) == (State.FAILURE, True)


def test_a_driver_that_is_not_there_is_not_asked() -> None:
    [one] = doctor_cuda.examine()
    assert one.state in (State.NOT_APPLICABLE, State.OK)


class _Driver:
    """As much of a driver as the doctor tries."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: list[tuple[int, int]] = []

    def any_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def register(self, address: int, length: int) -> int:
        self.registered.append((address, length))
        return self.code

    def unregister(self, address: int) -> int:
        assert [address] == [first for first, _ in self.registered]
        return 0

    def error_name(self, code: int) -> str:
        return "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("code", "status", "words"), [(0, 0, "works, "), (2, 1, "64 MiB cannot be registered: CUDA_ERROR_OUT_OF_MEMORY")]
)
def test_memory_is_registered_and_let_go(
    code: int, status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = _Driver(code)
    monkeypatch.setattr(cuda_driver, "driver", lambda: stand_in)
    assert doctor_cuda.main() == status
    assert capsys.readouterr().out.startswith(words)
    assert [length for _, length in stand_in.registered] == [doctor_cuda.TRIED_BYTES]


# --- the daemon and its hits -------------------------------------------------------------------------


def test_who_may_enter_the_run_dir(tmp_path: Path) -> None:
    (tmp_path / "session.sock").touch(0o666)
    tmp_path.chmod(0o755)
    found = doctor_daemon.examine(tmp_path, {}, "it is silent")
    states = {one.name: one.state for one in found}
    assert states["running"] is State.FAILURE, "a socket, and no daemon behind it"
    assert states[f"mode of {tmp_path.name}"] is State.FAILURE
    tmp_path.chmod(0o700)
    assert [one.name for one in doctor_daemon.examine(tmp_path / "none", {}, "") if one.remedy] == []


@pytest.mark.parametrize(
    ("pid", "starts", "uptime_s", "found"),
    [
        (0, 0, 60, []),
        (7, 1, 60, [(State.OK, "pid 7")]),
        (7, 2, 60, [(State.OK, "pid 7, 1 ended before it")]),
        (7, 4, 3600, [(State.WARNING, "pid 7, 3 ended before it")]),
        (7, 4, 4 * 3600, [(State.OK, "pid 7, 3 ended before it")]),
        (0, 2, 4 * 3600, [(State.WARNING, "none at the moment, 1 ended before it")]),
    ],
)
def test_worker_processes_of_directories(
    pid: int, starts: int, uptime_s: float, found: list[tuple[State, str]]
) -> None:
    directory = {"path": "/mnt/nvme0", "worker_pid": pid, "worker_starts": starts}
    tree = {"daemon": {"uptime_s": uptime_s}, "tiers": {"nvme": {"directories": [directory]}}}
    assert [(one.state, one.figure) for one in doctor_daemon._workers(tree)] == found


def space(number: int, asked: int = 0, hit: int = 0, stored: int = 0, engine: str = "e") -> dict[str, Any]:
    return {
        "id": number,
        "engine": engine,
        "asked_blocks": asked,
        "hit_blocks": hit,
        "stored_blocks": stored,
        "blocks": stored,
    }


def spec(**changed: Any) -> tiercache.NamespaceSpec:
    fields = {"engine": "e", "layout": "l", "dtype": "bfloat16", "block_size": 16, "block_bytes": 4096, **changed}
    return tiercache.NamespaceSpec(**fields)


def hits(spaces: list[dict[str, Any]], specs: Any = None, **counters: int) -> str:
    tree = {"daemon": {"uptime_s": 100}, "arena": {"bytes": GIB}, "namespaces": spaces, "counters": counters}
    found = doctor_hits.examine(tree, specs or {})
    return "\n".join(f"{one.state.value}: {one.name}: {one.figure} -> {one.remedy}" for one in found)


def test_what_carries_the_blocks_of_each_directory() -> None:
    used_up = "io_setup: other processes use all of fs.aio-max-nr (see /proc/sys/fs/aio-nr)"
    rows = [("/a", "aio", ""), ("/b", "threads", "nvme_io = threads"), ("/c", "threads", used_up), ("/d", "", "")]
    directories = [{"path": path, "io": io, "io_reason": reason} for path, io, reason in rows]
    found = list(doctor_daemon._disks({"tiers": {"nvme": {"directories": directories}}}))
    assert [(one.name, one.figure, one.state) for one in found] == [
        ("I/O of /a", "by aio", State.OK),
        ("I/O of /b", "by threads: nvme_io = threads", State.OK),
        ("I/O of /c", f"by threads: {used_up}", State.WARNING),
    ]
    assert "sysctl fs.aio-max-nr" in found[2].remedy


def test_why_there_are_no_hits() -> None:
    assert "no engine has registered" in hits([])
    assert "no engine has registered" in hits([space(1, asked=9, engine="tiercache/probe")]), "probes are no engine"
    assert "no prompt of a full block has come" in hits([space(1)])
    assert "the engine only stores" in hits([space(1, stored=5)])
    assert "nothing stored; 7 blocks found no room" in hits([space(1, asked=9)], refused_blocks=7)
    assert "is it a producer" in hits([space(1, asked=9)])
    assert "under other keys" in hits([space(1, asked=9, stored=5)])
    assert hits([space(1, asked=9, hit=3)]).startswith("ok: hit rate: 33.3% of 9 blocks")
    told = hits([space(1, asked=9, hit=3)], refused_blocks=7, refused_by_quota_blocks=7)
    assert "quotas: blocks refused: 7 in DRAM, 0 on NVMe" in told
    assert "found no room" not in told, "it is said only once"


def test_two_engines_that_pass_each_other_by_are_told_in_what_they_differ() -> None:
    near, far = {"rope": "yarn"}, {"rope": "yarn", "x": "1"}
    specs = {1: spec(), 2: spec(dtype="float8", extra=near), 3: spec(tp_size=2, extra=far)}
    told = hits([space(1, asked=9), space(2, stored=5), space(3, stored=5)], specs)
    assert "namespace 1 is asked for, 2 holds the blocks: they differ in dtype (bfloat16 and float8), " in told
    assert "extra.rope (None and yarn)" in told
    assert "namespace 1 is asked for, 3 holds" not in told, "only the nearest spec is named"
    assert "under other keys" not in told


def test_what_the_shared_store_had_for_nobody() -> None:
    figures = {"lookups": 1000, "lookups_late": 300, "bad_blocks": 2}
    tree = {"namespaces": [space(1, asked=9, hit=1)], "tiers": {"shared": figures}}
    found = {one.name: one for one in doctor_hits.examine(tree, {})}
    assert found["look-ups"].figure == "300 requests did not wait for the end of theirs, of 1,000 in the shared store"
    assert "--shared-lookup-timeout" in found["look-ups"].remedy
    assert found["bad blocks"].figure.startswith("2 in the shared store")
    figures |= {"lookups_late": 100, "bad_blocks": 0}
    assert {one.name for one in doctor_hits.examine(tree, {})} & {"look-ups", "bad blocks"} == set()


def test_what_is_evicted_too_soon() -> None:
    counters = {"stored_blocks": 4000, "evicted_blocks": 3000, "stored_bytes": 100 * GIB}
    told = hits([space(1, asked=9, hit=1)], **counters)
    assert "warning: evictions: 3,000 of 4,000 stored; DRAM holds the last 1.00 s of stores" in told
    assert "ok: evictions" in hits([space(1, asked=9, hit=1)], **{**counters, "stored_bytes": GIB})


# --- the command -------------------------------------------------------------------------------------


def test_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCACHE_ARENA", "16MiB")
    assert main(["doctor", "--quick", "--address", str(tmp_path / "none")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# host\n")
    assert "not applicable  running" in out
    monkeypatch.setenv("TIERCACHE_ARENA", "1TiB")
    assert main(["doctor", "--quick", "--json", "--address", str(tmp_path / "none")]) == 1
    tree = json.loads(capsys.readouterr().out)
    assert tree["ok"] is False
    failed = [one for one in tree["findings"] if one["state"] == "failure"]
    assert "memory" in failed[0]["name"]
    assert failed[0]["remedy"]


def test_with_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_disk, "MEASURED_BYTES", 2 << 20)
    monkeypatch.setattr(doctor_cuda, "examine", list)
    pool = tiercache.Pool.from_blocks(np.zeros((8, 4096), np.uint8))
    chain = tiercache.KeyChain(tiercache.root_key("m"), 16, range(128)).packed()
    settings: dict[str, Any] = {"nvme": str(tmp_path / "kv"), "nvme_size": "64MiB", "nvme_segment": "8MiB"}
    with tiercache.launch("4MiB", **settings) as daemon:
        for one, does in ((spec(), "match"), (spec(dtype="float16"), "store")):
            with tiercache.connect(
                daemon.address, namespace=one, pool=pool, name="e", required=True, request_timeout_s=10.0
            ) as connector:
                stats = connector.client.stats
                wait_until(lambda: stats()["tiers"]["nvme"]["directories"][0]["state"] == "ok", "the directory is open")  # noqa: B023
                if does == "store":
                    connector.store(chain, list(range(8)))
                else:
                    connector.match(chain)
        status = main(["doctor", "--json", "--address", daemon.address])
        found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert status == 0
    assert found["running"]["state"] == "ok"
    assert found["versions"]["state"] == "ok"
    assert "they differ in dtype (bfloat16 and float16)" in found["namespaces"]["figure"]
    assert "/s read" in found[f"{tmp_path / 'kv'} speed"]["figure"]
    assert found["modes"]["figure"].endswith("session.sock 0600, control.sock 0600")
