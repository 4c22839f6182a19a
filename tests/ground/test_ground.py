"""The small parts: histograms, quantities in texts, sockets that listen, and processes that import what they should."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

import tiercache
from tiercache.cli.doctor import gpu as doctor_gpu
from tiercache.connector.direct import probe as gds_probe
from tiercache.demo.child import Child
from tiercache.errors import ConfigError
from tiercache.ground import listening
from tiercache.ground.histograms import NANOSECONDS, LatencyHistogram, cumulative, percentiles_of, since
from tiercache.ground.isolated import quick_command
from tiercache.ground.units import without_quantities

# --- histograms against a sorted list of the same observations ---------------------------------------


DURATIONS = st.lists(st.integers(0, 10**13) | st.integers(0, 300) | st.integers(0, 10**7), min_size=1)


def seen(values: list[int]) -> LatencyHistogram:
    latency = LatencyHistogram()
    for ns in values:
        latency.observe(ns)
    return latency


@given(durations=DURATIONS, quantile=st.floats(0, 1))
def test_percentiles_are_at_most_an_eighth_too_high(durations: list[int], quantile: float) -> None:
    latency = seen(durations)
    rank = next(n for n in range(1, len(durations) + 1) if n >= quantile * len(durations))
    exact = sorted(durations)[rank - 1]
    assert exact <= latency.percentile(quantile) <= exact + max(exact / 8, 10)
    assert (latency.count, latency.sum, latency.max) == (len(durations), sum(durations), max(durations))


@given(durations=DURATIONS, power=st.integers(1, 12), digit=st.sampled_from([1, 2, 5]))
def test_what_prometheus_reads_is_exact_at_every_1_2_and_5(durations: list[int], power: int, digit: int) -> None:
    ends = [10**power, digit * 10**power]
    assert set(ends) <= set(NANOSECONDS)
    durations += ends  # an end belongs to its bucket
    assert cumulative(seen(durations).buckets(), ends) == [sum(ns <= end for ns in durations) for end in ends]


@given(first=DURATIONS, second=DURATIONS)
def test_a_window_is_the_difference_of_two_looks(first: list[int], second: list[int]) -> None:
    window = since(seen(first + second).buckets(), seen(first).buckets())
    assert window == seen(second).buckets()
    assert percentiles_of(window, [0.5, 1]) >= [0, max(second)]


def test_nothing_seen_and_clocks_that_step() -> None:
    latency = LatencyHistogram()
    assert latency.snapshot() == {"count": 0, "p50_us": 0, "p90_us": 0, "p99_us": 0, "max_us": 0, "sum_s": 0}
    latency.observe(-5)
    latency.observe(1 << 60)
    assert (latency.count, latency.sum, latency.percentile(0.5)) == (2, 1 << 60, 10)
    assert latency.percentile(1) == 1 << 60
    with pytest.raises(ValueError, match="0 to 1"):
        latency.percentile(99)


# --- quantities in texts for people ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("it has hung for 34 s", "it has hung for N s"),
        ("in 20.79ms, after 3 retries", "in Nms, after N retries"),
        ("196.3 MiB available, 16.0 MiB of it kept free", "N MiB available, N MiB of it kept free"),
        ("90% of 12 clients", "N% of N clients"),
        ("nvme directory /mnt/nvme0/kv: /mnt/1 is full", "nvme directory /mnt/nvme0/kv: /mnt/1 is full"),
        ("http://10.0.0.5:9000: HTTP 503: busy", "http://10.0.0.5:9000: HTTP 503: busy"),
        ("its process ended with status -9", "its process ended with status -9"),
        ("another daemon (pid 123) has it", "another daemon (pid 123) has it"),
    ],
)
def test_one_cause_is_one_text_and_two_causes_are_two(text: str, kind: str) -> None:
    assert without_quantities(text) == kind


# --- sockets that listen, or say in one line why they cannot -----------------------------------------


def test_an_address_that_is_taken_is_one_line_and_leaves_no_socket() -> None:
    with listening.bind("127.0.0.1", 0, "here") as first:
        listening.listen(first, 1, "here")
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="http = here cannot be listened on: Address already in use: choose"):
            listening.bind("127.0.0.1", first.getsockname()[1], "http = here")
        assert len(os.listdir("/proc/self/fd")) == before
        peer = socket.create_connection(first.getsockname())
        first.accept()[0].close()  # the port is in TIME_WAIT now, which must not stop a new server
        peer.close()
        again = first.getsockname()[1]
    listening.bind("127.0.0.1", again, "here").close()


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("[fe80::1]:80", r"write the interface of a link-local address, as in \[fe80::1%eth0\]"),
        ("tcp://[fe80::1%none]:80", "behind the % the name of an interface"),
        ("tcp://10.0.0.1:80", "choose another port, or another address of this host"),
    ],
)
def test_what_to_do_depends_on_the_address(address: str, remedy: str) -> None:
    assert re.search(remedy, listening.remedy(address))


@pytest.mark.parametrize(
    ("endpoint", "wants"),
    [
        ("tcp://[::1%lo]:80", True),
        ("tcp://127.0.0.1:80", False),
        ("tcp://four:80", False),
        ("tcp://both:80", False),
        ("tcp://six:80", True),
        ("tcp://unknown:80", True),
        ("tcp://hangs:80", True),
        ("ipc:///tmp/[six]", False),
    ],
)
def test_a_host_that_has_no_ipv4_address_is_reached_by_ipv6(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, wants: bool
) -> None:
    resolve, end = socket.getaddrinfo, threading.Event()

    def play(host: str, port: None, family: int, kind: int, *, flags: int) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return resolve(host, port, family, kind, flags=flags)
        if host == "hangs":
            end.wait(60)
        if host not in ("four", "both", "hangs"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", play)
    try:
        assert listening.wants_ipv6(endpoint, 0.0 if "hangs" in endpoint else 60.0) is wants
    finally:
        end.set()


# --- children import what their parent imports, and nothing of the folder they are started in --------


ROOT = Path(__file__).resolve().parents[2]
WANTED = ("tiercache", "msgspec", "zmq", "numpy", "uvicorn", "json", "logging", "typing", "runpy", "sitecustomize")


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory is full of modules that write to this file when they are imported, and then fail."""
    folder, proof = tmp_path / "cwd", tmp_path / "proof"
    folder.mkdir()
    for name in WANTED:
        code = f"import sys\nopen({str(proof)!r}, 'a').write({name!r} + ' in ' + repr(sys.orig_argv) + chr(10))\n"
        folder.joinpath(f"{name}.py").write_text(code + f"raise ImportError('the {name} of the current directory')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return proof


def test_no_child_imports_from_the_current_directory(proof: Path, tmp_path: Path) -> None:
    with tiercache.launch("2MiB", http="127.0.0.1:0") as daemon:
        wait_until(lambda: "serving http://" in daemon.log.read_text() or proof.exists(), "HTTP is served")
    assert gds_probe.probe_gds(tmp_path).host_bytes_per_s > 0
    assert doctor_gpu.examine()
    with Child("tiercache.cli.main", "--help", log=tmp_path / "help") as child:
        assert child.process.wait(60) == 0
    done = subprocess.run(quick_command("tiercache.cli.main"), capture_output=True, text=True, timeout=60, check=False)
    assert "Usage: tiercache" in done.stdout, done
    assert not proof.exists(), proof.read_text()


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-P",)])
def test_a_child_has_the_package_of_its_parent(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Also where only the parent knows where the package is, as in a script beside it."""
    if flags == ("-P",) and sys.version_info < (3, 11):
        pytest.skip("Python has -P from 3.11 on")
    other = tmp_path / "other"
    other.mkdir()
    other.joinpath("probe.py").write_text("import sys, tiercache\nprint(tiercache.__file__, sys.argv)\n")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import subprocess, tiercache.ground.isolated as isolated\n"
        "print(isolated.python_command('probe', 'a b', '-m'))\n"
        "subprocess.run(isolated.python_command('probe', 'a b', '-m'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(other)}
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    if flags in ((), ("-P",)):
        assert f"{ROOT / 'tiercache' / '__init__.py'} " in done.stdout, done
        assert "'a b', '-m']" in done.stdout.splitlines()[-1]
    else:  # the parent looks at no environment, so the child does not either
        assert "No module named probe" in done.stderr or "No module named 'probe'" in done.stderr


def test_modules_are_started_in_one_place_only() -> None:
    """`-m` beside an interpreter would import from the current directory."""
    places = []
    for folder in ("tiercache", "daemon", "connectors", "kernels", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search(r"""["']-m["'],\s*f?["']tiercache""", path.read_text()) and not path.is_symlink():
                places.append(str(path.relative_to(ROOT)))
    assert places == [], "use tiercache.ground.isolated.python_command"
