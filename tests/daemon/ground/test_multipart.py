"""Messages of too many parts."""

from __future__ import annotations

import zmq
from waiting import wait_until

from tiercache.daemon.ground.multipart import SKIPPED_AT_ONCE, Multipart


def test_a_message_of_too_many_parts_is_skipped_in_slices() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, context.socket(zmq.DEALER) as sender:
        socket.bind("inproc://here")
        sender.connect("inproc://here")
        messages, slices = Multipart(socket, 3), 0

        def received() -> list[bytes]:
            nonlocal slices
            try:
                message = messages.receive()
            except zmq.Again:
                return []
            slices += not message
            return [part.bytes for part in message[1:]]

        for count in (1, 2):
            sender.send_multipart([b"x"] * count)
            assert wait_until(received) == [b"x"] * count
        assert slices == 0
        sender.send_multipart([b"x"] * (3 * SKIPPED_AT_ONCE))
        sender.send(b"later")
        assert wait_until(received) == [b"later"]
        assert slices == 4, "the first parts, and three slices"
