"""Starts that go wrong: settings, run directories, parents. One clear line and status 2, or no daemon left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fault_peer import Peer
from fault_processes import Daemon
from waiting import state_of, wait_until

from tiercache.protocol import messages as m

BAD_SETTINGS: dict[str, tuple[list[str], str]] = {
    "a size that is none": (["--arena", "much"], "arena"),
    "a size of nothing": (["--arena", "0"], "arena"),
    "a negative size": (["--arena=-4GiB"], "arena"),
    "an odd region": (["--region", "3MiB"], "region"),
    "a share above all": (["--pin-share", "1.5"], "pin_share"),
    "a count that is none": (["--max-sessions", "many"], "max_sessions"),
    "no sessions": (["--max-sessions", "0"], "max_sessions"),
    "an unknown policy": (["--policy", "random"], "policy"),
    "an unknown level": (["--log-level", "loud"], "log_level"),
    "a time that never ends": (["--lease-ttl-max", "9000h"], "lease_ttl_max"),
    "no config file": (["--config", "/nowhere/tiercache.toml"], "/nowhere/tiercache.toml"),
    "a path too long for a socket": (["--run-dir", "/tmp/" + "x" * 120], "run_dir"),
    "a file for a run dir": (["--run-dir", "/etc/hostname"], "run_dir"),
    "a run dir that cannot be made": (["--run-dir", "/proc/nowhere"], "run_dir"),
}


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="tcf-", dir="/tmp") as path:
        yield Path(path)


def refused(*flags: str, **environment: str) -> str:
    """The one line with which a daemon refuses to start, having ended with status 2."""
    command = [sys.executable, "-m", "tiercache.daemon", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, **environment})
    assert done.returncode == 2, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("tiercache daemon: "), lines
    return lines[0]


@pytest.mark.parametrize("case", sorted(BAD_SETTINGS))
def test_a_wrong_setting_is_one_clear_line(directory: Path, case: str) -> None:
    flags, named = BAD_SETTINGS[case]
    own = [] if "--run-dir" in flags else ["--run-dir", str(directory)]
    line = refused(*own, *flags)
    assert named in line or named.replace("_", "-") in line
    assert not list(directory.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("arena = 'much'", "arena"),
        ("arena = ", "is not TOML"),
        ("colour = 'red'", "colour"),
        ("\xff\xfe", "tiercache.toml"),
        ("max_sessions = [1]", "max_sessions"),
    ],
)
def test_a_wrong_file_is_one_clear_line(directory: Path, text: str, named: str) -> None:
    file = directory / "tiercache.toml"
    file.write_bytes(text.encode("latin-1"))
    line = refused("--config", str(file), "--run-dir", str(directory / "run"))
    assert named in line


def test_a_wrong_environment_is_one_clear_line(directory: Path) -> None:
    line = refused("--run-dir", str(directory), TIERCACHE_ARENA="lots")
    assert "TIERCACHE_ARENA" in line
    assert "lots" in line


def test_a_run_dir_that_others_may_write_is_refused(directory: Path) -> None:
    directory.chmod(0o777)
    assert "chmod 0700" in refused("--run-dir", str(directory))


def test_a_daemon_ends_with_its_parent(closing: ExitStack, directory: Path) -> None:
    """The parent is killed and sends nothing: the daemon sees the end of file of its pipe."""
    code = (
        "import signal, sys, tiercache\n"
        "daemon = tiercache.launch('8MiB', run_dir=sys.argv[1], region='2MiB')\n"
        "print(daemon.pid, flush=True)\n"
        "signal.alarm(60)\n"
        "signal.pause()\n"
    )
    parent = closing.enter_context(
        subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True)
    )
    closing.callback(parent.kill)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert state_of(pid) not in ("", "Z")
    parent.kill()
    wait_until(lambda: state_of(pid) in ("", "Z"), "the daemon has ended with its parent")


def test_a_stopped_daemon_ends_with_its_parent_once_it_goes_on(closing: ExitStack) -> None:
    daemon = Daemon("--arena", "4MiB", "--region", "2MiB").start()
    closing.callback(daemon.close)
    daemon.stop()
    os.close(daemon._pipe)
    daemon._pipe = -1
    os.kill(daemon.pid, signal.SIGCONT)
    wait_until(lambda: not daemon.running(), "the daemon has ended")


def test_signals_during_the_start_end_the_daemon(closing: ExitStack) -> None:
    """SIGTERM as soon as there is a socket: status 0, sockets gone, no traceback."""
    daemon = Daemon("--arena", "256MiB", "--region", "8MiB")
    closing.callback(daemon.close)
    process = daemon.launch()
    wait_until(lambda: (Path(daemon.run_dir) / "lock").exists() and _answers(daemon), "it has begun")
    assert daemon.terminate() == 0
    assert process.returncode == 0
    assert "Traceback" not in daemon.log()


def _answers(daemon: Daemon) -> bool:
    try:
        with Peer(daemon.run_dir, map_arena=False):
            return True
    except OSError:
        return False


def test_terminated_under_load_it_ends_cleanly(
    start_daemon: Callable[..., Daemon], connect: Callable[..., Peer]
) -> None:
    daemon = start_daemon()
    peers = [connect(daemon) for _ in range(5)]
    for peer in peers:
        for _ in range(200):
            peer.post(m.Ping)
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.log()
