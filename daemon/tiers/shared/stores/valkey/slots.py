"""Which node of a cluster has which name (https://valkey.io/topics/cluster-spec).

A name belongs to one of 16,384 slots, by the CRC16 of the name or, if it has braces, of what is in them. `CLUSTER
SLOTS` says which nodes serve which slots. The answer is a stranger's: whatever it says, reading it is bounded.
"""

from __future__ import annotations

from binascii import crc_hqx

from tiercache.daemon.tiers.shared.stores.valkey.commands import written
from tiercache.daemon.tiers.shared.stores.valkey.line import ValkeyLine
from tiercache.daemon.tiers.shared.stores.valkey.refusals import SLOTS, read_refusal
from tiercache.daemon.tiers.shared.stores.valkey.url import Place, is_host

MOST_BYTES = 32 << 20
"""Memory that one answer may take: enough for 16,384 ranges with their nodes, and some more."""
ITEM_BYTES = 64
"""What each number, text or list counts for, besides the bytes of the text."""
MOST_DEPTH = 5
MOST_TEXT_BYTES = 4096

Reply = bytes | int | None | list["Reply"]


def hash_slot_of(name: bytes) -> int:
    """The slot of a name."""
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start + 1)
        if end > start + 1:
            name = name[start + 1 : end]
    return crc_hqx(name, 0) % SLOTS


def ask_slots(line: ValkeyLine) -> list[Place | None]:
    """The primary of each slot, as this node sees it; None: no node serves it. Raises StoreError."""
    line.send([written(b"CLUSTER", b"SLOTS")])
    first = line.read_line()
    if first[:1] == b"-":
        refusal = read_refusal(first)
        problem = refusal.problem
        if problem is not None:
            raise refusal.error(str(line.place), problem)
        raise line.breach(f"it does not tell the cluster's slots ({refusal}): without a cluster, write valkey://")
    reply = _Reader(line).read(first)
    owners: list[Place | None] = [None] * SLOTS
    if not isinstance(reply, list):
        raise line.breach("it did not answer CLUSTER SLOTS with a list")
    for entry in reply:
        if not (isinstance(entry, list) and len(entry) >= 3 and isinstance(entry[2], list) and len(entry[2]) >= 2):
            raise line.breach("it did not answer CLUSTER SLOTS with ranges of slots")
        low, high = entry[:2]
        host, port = entry[2][:2]
        if not (isinstance(low, int) and isinstance(high, int) and 0 <= low <= high < SLOTS):
            raise line.breach("it told slots that there are not")
        owners[low : high + 1] = [_place(line, host, port)] * (high + 1 - low)
    return owners


def _place(line: ValkeyLine, host: Reply, port: Reply) -> Place:
    """A node's place. A node that does not know its own host is at the place that was asked."""
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else ""
    if text in ("", "?"):
        text = line.place.host
    if not is_host(text) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise line.breach("it told a node's address that is none")
    return Place(text, port)


class _Reader:
    """Reads lists of lists of texts and numbers."""

    def __init__(self, line: ValkeyLine) -> None:
        self._line = line
        self._left = MOST_BYTES

    def read(self, first: bytes, depth: int = 0) -> Reply:
        """The reply that begins with this line."""
        kind, digits = first[:1], first[1:]
        if kind == b"+":
            return digits
        if digits == b"-1" and kind in (b"$", b"*"):
            return None
        if not digits.isdigit() or len(digits) > 9:
            raise self._line.breach("its answer about the cluster is not RESP2")
        number = int(digits)
        if kind == b":":
            return number
        if kind == b"$" and number <= MOST_TEXT_BYTES:
            self._left -= number
            text = bytearray(number)
            self._line.read_value((memoryview(text),))
            return bytes(text)
        self._left -= number * ITEM_BYTES
        if kind != b"*" or self._left < 0 or depth >= MOST_DEPTH:
            raise self._line.breach("its answer about the cluster is not RESP2, or too long")
        return [self.read(self._line.read_line(), depth + 1) for _ in range(number)]
