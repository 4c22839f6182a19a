"""Sockets that listen, or say in one line why they cannot."""

from __future__ import annotations

import os
import re
import socket

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
