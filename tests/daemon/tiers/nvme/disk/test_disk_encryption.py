"""Blocks encrypted at rest: real daemons and directories, other keys, swapped and flipped bytes."""

from __future__ import annotations

import importlib.util
import os
import secrets
from pathlib import Path

import pytest
from chains import chain_of, key_of
from cluster import Cluster, content

from tiercache.config.daemon_config import DaemonConfig
from tiercache.config.setting_kinds import NvmeDirectory
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.cipher import (
    OVERHEAD_BYTES,
    Cipher,
    CipherError,
    load_cipher,
    whose,
)
from tiercache.daemon.tiers.nvme.tier import NvmeTier
from tiercache.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed"),
]
BLOCKS = 40


def write_key(path: Path) -> Path:
    path.write_text(secrets.token_hex(32) + "\n")
    path.chmod(0o600)
    return path


def segments_of(cluster: Cluster) -> bytes:
    return b"".join(path.read_bytes() for one in cluster.directories for path in sorted(one.glob("segments/*.seg")))


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_nothing_on_the_disk_can_be_read_and_all_of_it_comes_back(tmp_path: Path, codec: str) -> None:
    cluster = Cluster(tmp_path, nvme_key=str(write_key(tmp_path / "key")), nvme_codec=codec)
    chain = chain_of("secret", BLOCKS)
    assert cluster.store(chain).stored == BLOCKS
    cluster.wait_written()
    cluster.restart()
    assert cluster.load(chain) == BLOCKS  # each byte compared
    assert cluster.nvme()["promoted_blocks"] == BLOCKS
    assert cluster.check_daemon(sample=-1).scanned_blocks == BLOCKS
    cluster.stop()
    stored = segments_of(cluster)
    for number in range(BLOCKS):
        assert content(key_of(chain, number))[:64].tobytes() not in stored


def test_a_flipped_bit_is_a_miss_even_where_the_checksum_is_made_right(tmp_path: Path) -> None:
    """The checksum is not a secret; the tag is what an attacker cannot make."""
    cipher = load_cipher(write_key(tmp_path / "key"))
    plain = secrets.token_bytes(8192)
    owner = whose(b"k" * 16, "fingerprint", 8192, codecs.SEALED)
    stored = memoryview(bytearray(8192 + OVERHEAD_BYTES))
    cipher.seal(plain, owner, stored)
    out = memoryview(bytearray(8192))
    cipher.open(stored, owner, out)
    assert out == plain
    others = [
        whose(b"l" * 16, "fingerprint", 8192, codecs.SEALED),
        whose(b"k" * 16, "other", 8192, codecs.SEALED),
        whose(b"k" * 16, "fingerprint", 8191, codecs.SEALED),
        whose(b"k" * 16, "fingerprint", 8192, codecs.SEALED | 1),
    ]
    for other in others:
        with pytest.raises(CipherError):
            cipher.open(stored, other, out)
    for at in (0, 11, 12, 4000, 8192 + 12, 8192 + 27):
        stored[at] ^= 1
        with pytest.raises(CipherError):
            cipher.open(stored, owner, out)
        stored[at] ^= 1
    for length in (0, 27, 28, 8192):
        with pytest.raises(CipherError):
            cipher.open(stored[:length], owner, out)
    with pytest.raises(CipherError):
        Cipher(secrets.token_bytes(32)).open(stored, owner, out)
    again = memoryview(bytearray(len(stored)))
    cipher.seal(plain, owner, again)
    assert again != stored, "each block is sealed under a nonce of its own"


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [("ab" * 32, 0o644, "chmod 0600"), ("ab" * 31, 0o600, "64 hex digits"), ("\0" * 64, 0o600, "64 hex digits")],
)
def test_key_files_of_the_wrong_form(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    config = DaemonConfig(nvme_dirs=(NvmeDirectory(tmp_path / "nvme"),), nvme_key=path)
    with pytest.raises(ConfigError, match=problem):
        NvmeTier(config, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cipher(tmp_path / "none")
    with pytest.raises(ConfigError, match="nvme_key /dev/zero can be read by others"):
        load_cipher(Path("/dev/zero"))  # and not read to its end


def test_equal_nonces_of_two_blocks_give_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has a key of its own: a nonce that comes twice would otherwise be the end of both (and of the tag)."""
    monkeypatch.setattr(os, "urandom", bytes)
    cipher, plain = Cipher(bytes(range(32))), bytes(4096)
    streams = set()
    for one in (whose(b"a" * 16, "f", 4096, 8), whose(b"b" * 16, "f", 4096, 8), whose(b"a" * 16, "g", 4096, 8)):
        out = bytearray(len(plain) + OVERHEAD_BYTES)
        cipher.seal(plain, one, memoryview(out))
        assert out[:12] == bytes(12), "the same nonce"
        streams.add(bytes(out[12:]))
        back = bytearray(len(plain))
        cipher.open(memoryview(out), one, memoryview(back))
        assert back == plain
    assert len(streams) == 3
