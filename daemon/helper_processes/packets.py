"""What is said on the control socket: one message is one packet, and its first byte says what it is.

To the child: its start message, as it is, and then `LINE`, each with the descriptor of a line, and `PING`. Back come
`READY`, `FAILED` and `TROUBLE` with a text, `LOG` with a level and a text, and `PONG`. The daemon's end is shut down
for writing when the child is to end.
"""

from __future__ import annotations

MAX_PACKET_BYTES = 160 << 10
"""Less than what a socket of this kind takes by default. A start message may be as long."""
MAX_TEXT = 4096
"""Characters of a text: the rest is cut off."""

LINE, READY, FAILED, LOG, TROUBLE, PING, PONG = b"S", b"R", b"F", b"L", b"T", b"P", b"O"


def failed_packet(text: str) -> bytes:
    return FAILED + text[:MAX_TEXT].encode(errors="replace")


def trouble_packet(text: str) -> bytes:
    return TROUBLE + text[:MAX_TEXT].encode(errors="replace")


def log_packet(level: int, text: str) -> bytes:
    return LOG + bytes([min(max(level, 0), 255)]) + text[:MAX_TEXT].encode(errors="replace")


def text_of(packet: bytes) -> tuple[int, str]:
    """Level and text of a `LOG`, or 0 and the text of a `FAILED` or `TROUBLE`."""
    if packet[:1] == LOG and len(packet) > 1:
        return packet[1], packet[2:].decode(errors="replace")
    return 0, packet[1:].decode(errors="replace")
