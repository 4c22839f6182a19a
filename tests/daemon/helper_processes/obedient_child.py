"""A helper process that does as its start message and its lines say. It runs by itself: see `test_helper_processes`."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

from tiercache.daemon.helper_processes.child import CannotStart, ControlSocket, run_child


def serve(control: ControlSocket) -> int:
    how, _, rest = control.start.decode().partition(":")
    if how == "end":
        return 3
    if how == "raise":
        raise ValueError("a defect")
    if how == "cannot":
        raise CannotStart("the disk is away")
    if how == "nonsense":
        control._end.send(b"?")
    control.say_ready()
    while how == "deaf":
        signal.pause()
    while line := control.next_line():
        threading.Thread(target=answer, args=(line, control), daemon=True).start()
    if how == "orderly":
        Path(rest).write_text("in order")
    return 0


def answer(line: socket.socket, control: ControlSocket) -> None:
    """One line: each packet is echoed, except for orders."""
    while order := line.recv(100):
        if order.startswith(b"trouble "):
            control.say_trouble(order[8:].decode())
            line.send(order)
        elif order == b"hang":
            threading.Event().wait()
        elif order == b"fork":
            child = os.fork()
            if not child:  # has the control socket, too
                signal.pause()
            line.send(b"%d" % child)
        else:
            line.send(order)
    line.close()


def main() -> None:
    run_child(serve, "the obedient process")
