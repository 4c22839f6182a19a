"""Helper processes of any kind: how they start, end, hang and are replaced, with one that obeys (`obedient_child`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from waiting import state_of, wait_until

from tiercache.daemon.helper_processes import packets, supervisor
from tiercache.daemon.helper_processes.child import ControlSocket
from tiercache.daemon.helper_processes.limits import ProcessLimits
from tiercache.daemon.helper_processes.process import HelperProcess, ProcessError, ProcessProblem
from tiercache.daemon.helper_processes.supervisor import Supervisor

EAGER = ProcessLimits(first_pause_s=0.01, longest_pause_s=0.05, steady_s=0.0)


def soon() -> float:
    return time.monotonic() + 50.0


@dataclass
class Owner:
    """Keeps what the callbacks say, in order."""

    start: Callable[[], bytes]
    limits: ProcessLimits
    told: list[tuple[str, int]] = field(default_factory=list)
    whys: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(
            "obedient_child",
            "process of a test",
            self.start,
            self.limits,
            lambda its: self.told.append(("started", its.pid)),
            self._ended,
            lambda its: self.told.append(("gone", its.pid)),
        )

    def _ended(self, its: HelperProcess | None, why: str) -> None:
        self.told.append(("ended", its.pid if its else 0))
        self.whys.append(why)

    def ask(self, order: bytes, process: HelperProcess | None = None) -> bytes:
        """What the process answers; nothing if it ends instead."""
        its, line = self.supervisor.open_line(soon())
        assert process in (None, its)
        with line:
            line.settimeout(50)
            line.send(order)
            try:
                return line.recv(20_000)
            except ConnectionError:
                return b""

    def pid(self) -> int:
        its, line = self.supervisor.open_line(soon())
        line.close()
        return its.pid

    def problem(self) -> ProcessError | None:
        try:
            self.supervisor.open_line(time.monotonic())[1].close()
        except ProcessError as error:
            return error
        return None


Own = Callable[..., Owner]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parent)]))
    owners: list[Owner] = []

    def own(how: str = "serve", limits: ProcessLimits = EAGER) -> Owner:
        owners.append(Owner(lambda: how.encode(), limits))
        owners[-1].supervisor.begin()
        return owners[-1]

    yield own
    for one in owners:
        one.supervisor.limits = ProcessLimits(reap_s=20.0)  # each is reaped, however busy the machine is
        one.supervisor.close()


def test_it_gets_its_start_message_and_serves_lines(own: Own) -> None:
    owner = own()
    assert owner.ask(b"hello") == b"hello"
    wait_until(lambda: owner.told, "the callback")
    assert owner.told == [("started", owner.pid())]


@pytest.mark.stress
@pytest.mark.parametrize("how", ["stopped", "in a call"])
def test_one_that_hangs_is_killed_and_replaced(own: Own, how: str) -> None:
    owner = own(limits=ProcessLimits(0.01, 0.05, 0.0, hung_s=0.0))
    its, line = owner.supervisor.open_line(soon())
    if how == "stopped":
        os.kill(its.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(its.pid) == "T", "it to stop")
    line.send(b"hang")
    owner.supervisor.give_up_line(its, line, time.monotonic())
    wait_until(lambda: len(owner.told) == 4, "another one")
    assert [what for what, _ in owner.told] == ["started", "ended", "gone", "started"]
    assert owner.whys == ["hung and was killed"]
    assert owner.pid() != its.pid
    assert state_of(its.pid) == ""
    owner.supervisor.give_up(its)  # too late: that one is lost already
    assert owner.ask(b"hello") == b"hello"
    assert (owner.supervisor.starts, owner.supervisor.given_up, owner.supervisor.late_calls) == (2, 1, 1)


@pytest.mark.stress
@pytest.mark.parametrize("how", ["stopped", "deaf"])
def test_one_that_answers_no_ping_is_killed_though_nobody_has_called_it(
    own: Own, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "PING_S", 0.05)
    owner = own("deaf" if how == "deaf" else "serve", replace(EAGER, silent_s=1.0))
    pid = owner.pid()
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: len(owner.told) >= 4, "another one")
    assert owner.told[:3] == [("started", pid), ("ended", pid), ("gone", pid)]
    assert owner.whys[0] == "hung and was killed"
    assert "the process of a test does not answer: it is killed" in caplog.text


def test_time_in_which_the_daemon_is_stopped_itself_is_not_its_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    class Its:
        ready = True
        ping = staticmethod(lambda: True)

    one = supervisor.Pulse(Its(), 3.0)  # type: ignore[arg-type]
    now_s[0] += 1.0
    assert one.beats()
    now_s[0] += 1000.0
    assert one.beats(), "one ping is missed, however late that is seen"
    one.heard()
    for beats in (True, True, True, False):
        now_s[0] += 1.0
        assert one.beats() is beats


def test_a_late_call_costs_its_line_and_only_so_many_may_be_late(own: Own) -> None:
    owner = own(limits=ProcessLimits(max_late_lines=2))
    for _ in range(2):
        its, line = owner.supervisor.open_line(soon())
        line.send(b"hang")
        owner.supervisor.give_up_line(its, line, time.monotonic())
    with pytest.raises(ProcessError, match="2 calls were not answered yet") as caught:
        owner.supervisor.open_line(soon())
    assert caught.value.problem is ProcessProblem.LATE
    assert owner.supervisor.stats()["late_lines"] == 2
    assert owner.supervisor.starts == 1


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("end", "ended with status 3"),
        ("raise", "ended with status 1"),
        ("cannot", "could not start: the disk is away"),
        ("nonsense", "ended with status -9"),
    ],
)
def test_one_that_ends_at_once_is_told_and_tried_again_after_pauses(
    own: Own, how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner = own(how, ProcessLimits(0.01, 0.02, steady_s=1000.0))
    error = wait_until(lambda: (its := owner.problem()) and its.problem is ProcessProblem.ENDED and its, "the text")
    assert isinstance(error, ProcessError)
    assert error.text == f"its helper process {why}, and the log says why: another one starts soon"
    wait_until(lambda: len(owner.whys) >= 3, "further attempts")
    assert set(owner.whys) == {why}
    for pause in ("0.01", "0.02"):
        wait_until(lambda pause=pause: f"{why}: another one starts in {pause} s" in caplog.text, "the log")
    if how == "raise":
        assert "the obedient process fails" in caplog.text
        assert "ValueError: a defect" in caplog.text


def test_with_one_at_a_time_the_next_waits_until_the_last_is_really_gone(
    own: Own, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the kernel's state D: here a process whose SIGKILL does not come."""
    owner = own(limits=ProcessLimits(0.01, 0.02, 0.0, max_undead=1, reap_s=0.01))
    first, line = owner.supervisor.open_line(soon())
    line.close()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: os.kill(process.pid, signal.SIGSTOP))
        owner.supervisor.give_up(first)
        wait_until(lambda: "another one starts once one of them is gone" in caplog.text, "the wait")
    try:
        assert owner.told[1:] == [("ended", first.pid)]
        error = owner.problem()
        assert error is not None
        assert error.problem is ProcessProblem.ENDED
        assert error.text.endswith("another one starts once one is gone")
        assert owner.supervisor.trouble == error.text
        assert owner.supervisor.stats()["undead"] == owner.supervisor.starts == 1
        assert "the process of a test hangs in the kernel: another one starts once one of them is gone" in caplog.text
    finally:
        os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: len(owner.told) == 4, "another one")
    assert [what for what, _ in owner.told] == ["started", "ended", "gone", "started"]
    assert owner.supervisor.stats()["undead"] == 0


def test_its_trouble_is_known_until_it_says_that_all_is_well_and_so_is_its_loss(own: Own) -> None:
    owner = own()
    supervisor = owner.supervisor
    owner.ask(b"trouble a file is stuck")
    wait_until(lambda: supervisor.trouble == "a file is stuck", "the trouble")
    owner.ask(b"trouble ")
    wait_until(lambda: supervisor.trouble == "", "its end")
    supervisor.limits = replace(EAGER, first_pause_s=1000.0, longest_pause_s=1000.0, steady_s=1000.0)
    for number in range(2):  # the second of two short lives is followed by a pause
        its, line = supervisor.open_line(soon())
        line.close()
        os.kill(its.pid, signal.SIGKILL)
        wait_until(lambda number=number: supervisor.ends == number + 1, "its end")
    wait_until(lambda: "ended with status -9" in supervisor.trouble, "the loss")


def test_trouble_that_finds_no_room_is_not_taken_for_said() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(b"start")
        control = ControlSocket(theirs)
        said = 0
        while control.say_trouble(f"{said}"):
            said += 1
        for number in range(said):
            assert packets.text_of(ours.recv(100)) == (0, f"{number}")
        assert control.say_trouble("now")
        assert packets.text_of(ours.recv(100)) == (0, "now")


def test_one_that_is_dead_is_not_gone_before_its_sockets_are_closed(own: Own) -> None:
    owner = own(limits=ProcessLimits(0.01, 0.02, 0.0, max_undead=1, reap_s=0.01))
    first = owner.pid()
    heir = int(owner.ask(b"fork"))
    try:
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: owner.supervisor.stats()["undead"], "its end")
        assert state_of(first) == ""
        assert owner.whys == ["ended with status -9"]
        assert owner.supervisor.starts == 1
    finally:
        os.kill(heir, signal.SIGKILL)
    wait_until(lambda: ("gone", first) in owner.told, "the end of the heir")


@pytest.mark.parametrize("orderly_s", [0.0, 50.0])
def test_closing_lets_it_end_by_itself_where_there_is_time(own: Own, tmp_path: Path, orderly_s: float) -> None:
    before = len(os.listdir("/proc/self/fd"))
    owner = own(f"orderly:{tmp_path}/end")
    assert owner.ask(b"hello") == b"hello"
    pid = owner.supervisor.stats()["pid"]
    assert owner.supervisor.close(orderly_s)
    assert (tmp_path / "end").exists() == (orderly_s > 0)
    assert state_of(str(pid)) == ""
    assert len(os.listdir("/proc/self/fd")) == before
    error = owner.problem()
    assert error is not None
    assert error.problem is ProcessProblem.STARTING
