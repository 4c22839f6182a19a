"""Names of blocks and notes in a shared store.

    tc1:DEPLOYMENT:FINGERPRINT:EPOCH:MARK       a block (or a pack of blocks, named by its last one)
    tc1:DEPLOYMENT:notes                        the note of the deployment
    tc1:DEPLOYMENT:FINGERPRINT:notes            the note of a namespace
    tc1:DEPLOYMENT:FINGERPRINT:notes:BUCKET     the note of a bucket of its chains

The *mark* is a keyed hash of the block's key, the namespace and the epoch (BLAKE2b, RFC 7693). Names cannot be made
without the key of the deployment, so neither the store nor a stranger who reads it can test whether a prompt is there.

An *epoch* is a hash of three notes: those of the deployment, of the namespace, and of the bucket in which the chain
lies. A note is random. To flush is to replace a note: that changes all names below it, for every host that has read the
new one, and what was stored under the former names is never found again. A chain's bucket follows from its first block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

FORMAT = b"tc1"
MARK_BYTES = 16
EPOCH_BYTES = 16
NOTE_BYTES = 16
BUCKETS = 64
"""A flush of one chain makes the other chains of its bucket unreachable too: the 64th part of its namespace."""
_PERSON = b"tiercache-names"
_EPOCH_SHOWN = 8  # hex digits of the epoch in a name: enough for operators to tell old from new
DEEP = 1024
"""At this depth a block lives half as long as the first block of a chain."""


def lifetime_s(ttl_s: float, number: int) -> float:
    """How long block `number` of a chain lives after it was stored or read.

    Deeper blocks live shorter, so a full store drops the ends of chains first.
    """
    return ttl_s * DEEP / (DEEP + number)


class Scope(NamedTuple):
    """What shares an epoch: the chains of a namespace in one bucket."""

    fingerprint: str
    bucket: int


class BlockIdentity(NamedTuple):
    """What a value must prove to be: this block of this namespace, stored under this epoch.

    `mark` as in its name; `block_bytes` as the client stored it.
    """

    key: bytes
    fingerprint: str
    epoch: bytes
    mark: bytes
    block_bytes: int


class Naming:
    """Names for one deployment. Immutable; any thread.

    deployment: letters, digits, and . _ -; secret: 32 bytes, or empty where names need not be secret.
    """

    def __init__(self, deployment: str, secret: bytes) -> None:
        self._prefix = FORMAT + b":" + deployment.encode() + b":"
        self._secret = secret
        self.deployment_note = self._prefix + b"notes"

    def bucket(self, root: bytes) -> int:
        """The bucket of the chains that begin with this block."""
        digest = hashlib.blake2b(root, digest_size=2, key=self._secret, person=_PERSON).digest()
        return int.from_bytes(digest, "little") % BUCKETS

    def namespace_note(self, fingerprint: str) -> bytes:
        """The name of a namespace's note."""
        return self._prefix + fingerprint.encode() + b":notes"

    def bucket_note(self, scope: Scope) -> bytes:
        """The name of a bucket's note."""
        return b"%b:%d" % (self.namespace_note(scope.fingerprint), scope.bucket)

    def notes(self, scope: Scope) -> tuple[bytes, bytes, bytes]:
        """Names of the notes that make the epoch of a scope."""
        return self.deployment_note, self.namespace_note(scope.fingerprint), self.bucket_note(scope)

    def fingerprint_of(self, note: bytes) -> str:
        """The namespace that a note is about; empty for that of the deployment."""
        fingerprint, _, _ = note.removeprefix(self._prefix).rpartition(b"notes")
        return fingerprint.decode().removesuffix(":")

    def note_above(self, note: bytes) -> bytes:
        """The note of all that a note is about, and more: of a bucket its namespace's, else that of the deployment."""
        above, _, bucket = note.rpartition(b":")
        return above if bucket.isdigit() else self.deployment_note

    def epoch(self, notes: Sequence[bytes]) -> bytes:
        """The epoch that these notes, in the order of `notes`, make."""
        assert len(notes) == 3
        lengths = b"".join(len(note).to_bytes(2, "little") for note in notes)
        return hashlib.blake2b(lengths + b"".join(notes), digest_size=EPOCH_BYTES, person=_PERSON).digest()

    def mark(self, fingerprint: str, epoch: bytes, key: bytes) -> bytes:
        """The keyed hash that stands for a block."""
        told = fingerprint.encode() + epoch + key
        return hashlib.blake2b(told, digest_size=MARK_BYTES, key=self._secret, person=_PERSON).digest()

    def block(self, scope: Scope, epoch: bytes, key: bytes) -> bytes:
        """The name of a block under the epoch of its scope."""
        shown, mark = epoch.hex()[:_EPOCH_SHOWN], self.mark(scope.fingerprint, epoch, key).hex()
        return b"%b%b:%b:%b" % (self._prefix, scope.fingerprint.encode(), shown.encode(), mark.encode())

    def identity(self, scope: Scope, epoch: bytes, key: bytes, block_bytes: int) -> BlockIdentity:
        """What the value of that block must prove to be."""
        return BlockIdentity(key, scope.fingerprint, epoch, self.mark(scope.fingerprint, epoch, key), block_bytes)
