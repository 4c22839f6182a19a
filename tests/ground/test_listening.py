"""Sockets that listen, or say in one line why they cannot."""

from __future__ import annotations

import os
import re
import socket
import threading
from typing import Any

import pytest

from tiercache.errors import ConfigError
from tiercache.ground import listening


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
