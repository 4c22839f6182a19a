"""Run a command again and again, every second time on a machine that is kept busy: `make test-again N=20`.

A busy run has four loops beside it that compute, one that writes to the disk and waits for it, and pauses of 20 to
400 ms in random threads of every Python process (tests/pauses). All runs have to pass. One line for each run. The
output of a run that fails is kept in a file.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOOPS = 4
COMPUTE = "while True: sum(range(10_000))"
WRITE = """
import os, sys
with open(sys.argv[1], "wb", buffering=0) as file:
    os.unlink(sys.argv[1])
    while True:
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        for _ in range(64):
            file.write(bytes(1 << 20))
        os.fsync(file.fileno())
"""
SUMMARY = re.compile(r"^=* ?(\d.*(?:passed|failed|error|skipped).*?) ?=*$", re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@contextmanager
def process(*command: str) -> Iterator[None]:
    """A process that runs meanwhile. It ends with this one, whatever ends this one."""
    child = subprocess.Popen([sys.executable, "-I", "-c", *command])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def run(command: list[str], busy: bool, number: int, log: Path) -> tuple[bool, float]:
    """Run the command once, its output into `log`. True if it passed, and the seconds it took."""
    environment = dict(os.environ)
    with ExitStack() as stack:
        if busy:
            for _ in range(LOOPS):
                stack.enter_context(process(COMPUTE))
            stack.enter_context(process(WRITE, str(log.with_suffix(".written"))))
            paths = str(HERE / "pauses"), environment.get("PYTHONPATH", "")
            environment |= {"PAUSES": str(number), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        begun = time.monotonic()
        with log.open("wb") as output:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    return code == 0, time.monotonic() - begun


def main() -> int:
    """The exit code is 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int)
    parser.add_argument("command", nargs="+", help="after --")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="again-"))
    good = 0
    for number in range(1, asked.runs + 1):
        log, busy = folder / f"{number}.log", number % 2 == 0
        passed, seconds = run(asked.command, busy, number, log)
        said = log.read_text(errors="replace")
        summary = SUMMARY.findall(said)
        print(
            f"{number:3} {'busy ' if busy else 'quiet'} {seconds:5.0f} s  {summary[-1] if summary else ''}", flush=True
        )
        if passed:
            good += 1
            log.unlink()
        else:
            print(*(f"      {name}" for name in FAILED.findall(said)), f"      {log}", sep="\n", flush=True)
    print(f"{good} of {asked.runs} runs passed")
    return 0 if good == asked.runs else 1


if __name__ == "__main__":
    sys.exit(main())
