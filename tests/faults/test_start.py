"""Starts that go wrong: settings, run directories, parents, former lives. One clear line, or no daemon left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from chains import chain_of
from fault_blocks import spec_of
from fault_peer import NoAnswer, Peer
from fault_processes import Daemon
from waiting import state_of, wait_until

from tiercache.protocol import messages as m

pytestmark = pytest.mark.stress

BAD_SETTINGS: dict[str, tuple[list[str], str]] = {
    "a size that is none": (["--arena", "much"], "arena"),
    "no config file": (["--config", "/nowhere/tiercache.toml"], "/nowhere/tiercache.toml"),
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
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


SPEC = spec_of(64 << 10)


def test_28_requests_of_a_former_life_are_refused(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    """A DEALER keeps what was sent to a dead daemon, and brings it to the next one."""
    old, keys = connect(daemon), chain_of("former", 3)
    old.store_chain(SPEC, keys)
    daemon.kill()
    flush = old.post(m.Flush, tier="all", namespaces=[], key=b"", deadline_s=60)
    match = old.post(m.Match, namespaces=[1], keys=keys, ttl_ms=60_000, deadline_s=60)
    daemon.start()
    new = connect(daemon)
    new.store_chain(SPEC, keys)
    for request_id in (flush, match):
        reply = old.answer_to(request_id, 15)
        assert isinstance(reply, m.Error)
        assert reply.code == m.ErrorCode.STALE_GENERATION.value
        assert reply.generation == new.generation != old.generation
    assert new.load_chain(SPEC, keys) == 3, "the old life's flush did nothing"
    assert daemon.stats()["leases"]["read"] == 0
    stale = new.tell(m.Flush, generation=old.generation, tier="all", namespaces=[], key=b"")
    assert stale.code == m.ErrorCode.STALE_GENERATION.value
    assert new.load_chain(SPEC, keys) == 3


def test_7_a_second_daemon_on_the_same_run_dir_is_refused(
    daemon: Daemon, connect: Callable[..., Peer], closing: ExitStack
) -> None:
    peer, keys = connect(daemon), chain_of("first", 4)
    peer.store_chain(SPEC, keys)
    for _ in range(2):
        second = Daemon("--arena", "4MiB", run_dir=daemon.run_dir)
        closing.callback(second.close)
        assert second.launch().wait(60) == 2
        lines = second.log().splitlines()
        assert len(lines) == 1, second.log()
        assert f"pid {daemon.pid}" in lines[0]
        assert "--run-dir" in lines[0]
    assert peer.load_chain(SPEC, keys) == 4
    assert connect(daemon).load_chain(SPEC, keys) == 4, "the sockets are still the first one's"


def test_15_a_terminated_daemon_says_good_bye(daemon: Daemon, connect: Callable[..., Peer]) -> None:
    peer = connect(daemon)
    peer.store_chain(SPEC, chain_of("bye", 2))
    peer.reserve_chain(SPEC, chain_of("open", 2))
    assert daemon.terminate() == 0
    assert peer.is_over()
    with pytest.raises(NoAnswer):
        peer.tell(m.Ping, timeout_s=0.1)  # rule: it has ended
