"""Encryption of blocks at rest: AES-256-GCM (NIST SP 800-38D), by the library `cryptography`.

    stored:   nonce 12 │ ciphertext, as long as the block (or its encoded form) │ tag 16

The tag also covers the identity of the block, so that bytes under a wrong row do not decrypt. Each block has a key of
its own, derived from the file's key and that identity (keyed BLAKE2b, RFC 7693), and each write a random nonce: equal
nonces matter within one block only, and no number of blocks exhausts the file's key (SP 800-38D, 8.3). Blocks on NVMe
that were written with another key are dropped at the start: the catalog of each directory records which key its rows
use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError
from tiercache.ground.units import round_up

OVERHEAD_BYTES = 28
KEY_BYTES = 32
_NONCE_BYTES = 12
_PERSON = b"tiercache-block"
_PERSON_OF_ID = b"tiercache-key-id"
_PAGE_BYTES = 4096
_KEY = re.compile(rb"[0-9a-fA-F]{64}\s*")


def sealed_bytes(frame_bytes: int, block_bytes: int) -> int:
    """The slot size of an encrypted block: it may be a page longer than the frame."""
    return max(frame_bytes, round_up(block_bytes + OVERHEAD_BYTES, _PAGE_BYTES))


def whose(key: bytes, fingerprint: str, length: int, codec: int) -> bytes:
    """What a tag covers besides the bytes: the block's identity and form."""
    return b"".join([key, fingerprint.encode(), length.to_bytes(8, "little"), bytes([codec])])


class CipherError(ValueError):
    """Stored bytes that were not sealed with this key, or not for this block."""


class Cipher:
    """One key. Thread-safe; blocks for a few hundred microseconds per MiB."""

    def __init__(self, key: bytes, setting: str = "nvme_key") -> None:
        """Raises ConfigError without the library."""
        assert len(key) == KEY_BYTES
        try:
            # Imported here: a worker process without a key starts sooner.
            from hashlib import blake2b

            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            from tiercache.ground.extras import install_extra

            text = f"{setting} needs the package cryptography: {install_extra('encryption')}"
            raise ConfigError(text) from error
        self._key, self._hash = key, blake2b
        self.key_id = self._hash(digest_size=16, key=key, person=_PERSON_OF_ID).digest()
        """Tells this key from others, and reveals nothing else of it."""
        self._make: Callable[[bytes], Any] = AESGCM
        self._invalid = InvalidTag

    @property
    def secret(self) -> bytes:
        """The key itself, for another process of the daemon that does the same with it."""
        return self._key

    def derived_key(self, person: bytes) -> bytes:
        """A key for another purpose, which `person` (at most 16 bytes) names. It reveals nothing of this one."""
        return self._hash(digest_size=KEY_BYTES, key=self._key, person=person).digest()

    def _aead(self, whose: bytes) -> Any:
        """The AEAD that seals and opens one block: 4 us."""
        return self._make(self._hash(whose, digest_size=KEY_BYTES, key=self._key, person=_PERSON).digest())

    def seal(self, plain: memoryview | bytes, whose: bytes, out: memoryview) -> None:
        """Write the sealed bytes of `plain` into `out`, which is `OVERHEAD_BYTES` longer."""
        nonce = os.urandom(_NONCE_BYTES)
        out[:_NONCE_BYTES] = nonce
        self._aead(whose).encrypt_into(nonce, plain, whose, out[_NONCE_BYTES:])

    def open(self, stored: memoryview, whose: bytes, out: memoryview) -> None:
        """Write the plain bytes into `out`, which has their length. CipherError leaves undefined bytes in `out`."""
        if len(stored) != len(out) + OVERHEAD_BYTES:
            raise CipherError(f"{len(stored)} stored bytes for {len(out)}")
        try:
            self._aead(whose).decrypt_into(bytes(stored[:_NONCE_BYTES]), stored[_NONCE_BYTES:], whose, out)
        except self._invalid as error:
            raise CipherError("another key, or another block") from error


def load_cipher(path: Path, setting: str = "nvme_key") -> Cipher:
    """The cipher of a key file: 64 hex digits that only its owner can read. A ConfigError names the `setting`."""
    try:
        mode, text = path.stat().st_mode, b""
        if not mode & 0o077:
            with path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES)  # a device has no end
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read ({error.strerror}): {_MAKE}") from error
    if mode & 0o077:
        raise ConfigError(f"{setting} {path} can be read by others (mode {mode & 0o777:04o}): chmod 0600 {path}")
    if not _KEY.fullmatch(text):
        raise ConfigError(f"{setting} {path} does not hold a key (64 hex digits): {_MAKE}")
    return Cipher(bytes.fromhex(text.decode()), setting)


_MAX_FILE_BYTES = 4096
_MAKE = "make one with `(umask 077; openssl rand -hex 32 > FILE)`"
