"""`tiercache serve` that stops, as on SIGTERM, at the end of its stdin, so with the process that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading

from tiercache.cli.main import main


def _stop_at_the_end() -> None:
    while os.read(0, 4096):  # without sys.stdin, whose lock the exit of this process would wait for
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_at_the_end, name="stdin", daemon=True).start()
    sys.exit(main(["serve", *sys.argv[1:]]))
