"""Values that are not what was stored: a miss that costs no other block, and the next store of it replaces them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chains import chain_of, key_of
from host_rig import BLOCK_BYTES, KEY, HostRig, host, names_of
from memory_store import MemoryStore
from played import play, played

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.cipher import Cipher
from tiercache.daemon.tiers.shared.naming import BlockIdentity
from tiercache.daemon.tiers.shared.value import HEADER_BYTES, ValueForm, announced_bytes

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")

BLOCKS, VICTIM = 12, 5
CHAIN = chain_of("x", BLOCKS)
CHECKSUM_AT, MARK_AT = 24, 32

Spoil = Callable[[bytes], bytes]


def changed(at: int, by: int = 1) -> Spoil:
    """One bit of it is another."""

    def spoil(value: bytes) -> bytes:
        place = at % len(value)
        return value[:place] + bytes([value[place] ^ by]) + value[place + 1 :]

    return spoil


FIELDS = {
    "codec": 5,
    "kind": 6,
    "block bytes": 8,
    "body bytes": 16,
    "checksum": 24,
    "mark": 32,
    "name": 48,
    "epoch": 64,
}
BY_ITSELF: dict[str, Spoil] = {
    "a bit of the block": changed(-100),
    "its last bit": changed(-1, 0x80),
    "no header": changed(0),
    **{f"a bit of the {name}": changed(at) for name, at in FIELDS.items()},
    "a sealed codec": changed(5, codecs.SEALED),
    "an older header": lambda value: value[:4] + bytes([value[4] - 1]) + value[5:],
    "a newer header": lambda value: value[:4] + bytes([value[4] + 1]) + value[5:],
    "cut by a byte": lambda value: value[:-1],
    "cut within the header": lambda value: value[: HEADER_BYTES // 2],
    "cut to the header": lambda value: value[:HEADER_BYTES],
    "empty": lambda value: b"",
    "longer by a byte": lambda value: value + b"x",
    "much longer": lambda value: value + bytes(3 << 20),
    "zeros": lambda value: bytes(len(value)),
}
OF_ANOTHER_RELEASE = ("an older header", "a newer header")
"""No fault of the store: hosts of two releases may share one."""


def misplaced(store: MemoryStore, a: HostRig) -> dict[str, bytes]:
    """Values that are right elsewhere: each proves itself, but for what it stands for."""
    names = names_of(a, CHAIN)
    good, other = store.values[names[VICTIM]], store.values[names[VICTIM + 1]]
    body_of_other = good[:CHECKSUM_AT] + other[CHECKSUM_AT:MARK_AT] + good[MARK_AT:HEADER_BYTES] + other[HEADER_BYTES:]
    return {
        "the body of another block": body_of_other,
        "another block of the chain": other,
        "another chain": store.values[names_of(a, chain_of("y", BLOCKS))[VICTIM]],
        "another rank": store.values[names_of(a, CHAIN, a.namespace(tp_rank=1))[VICTIM]],
    }


def forged(a: HostRig) -> dict[str, bytes]:
    """Values that whoever can write to the store might make: the header is right in all it says, and the checksum."""
    scope = a.shared.scope_of(a.namespace(), CHAIN[:16])
    epoch = a.shared.epochs.of(scope)
    assert epoch is not None
    whose = a.shared.epochs.naming.identity(scope, epoch, key_of(CHAIN, VICTIM), BLOCK_BYTES)
    made = {}
    for what, form in {"plain": ValueForm(None), "sealed with another key": ValueForm(Cipher(bytes(32)))}.items():
        scratch = memoryview(bytearray(form.body_bytes(BLOCK_BYTES)))
        made[what] = b"".join(map(bytes, form.pack(whose, memoryview(b"poison" * BLOCK_BYTES)[:BLOCK_BYTES], scratch)))
    return made


@pytest.mark.parametrize("secret", [KEY, None], ids=["sealed", "plain"])
def test_what_is_not_what_was_stored_is_a_miss(tmp_path: Path, secret: bytes | None) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        a, b = (host(store, tmp_path, name, secret=secret) for name in "ab")
        space = b.namespace()
        for chain in (CHAIN, chain_of("y", BLOCKS)):
            for of in (a.namespace(), a.namespace(tp_rank=1)):
                a.store(of, chain)
        await a.sent()
        name = names_of(a, CHAIN)[VICTIM]
        good = store.values[name]
        bad = {what: spoil(good) for what, spoil in BY_ITSELF.items()} | misplaced(store, a)
        if secret is not None:
            bad |= forged(a)
        counted = others = 0
        for what, value in bad.items():
            store.values[name] = value
            assert await b.load([space], CHAIN) == VICTIM, what
            counted += what not in OF_ANOTHER_RELEASE
            others += what in OF_ANOTHER_RELEASE
            told = b.shared.stats()
            assert (told["bad_blocks"], told["other_version_blocks"]) == (counted, others), what
            assert await b.look_up([space], CHAIN) == VICTIM, f"{what}: it is claimed again"
            b.store(space, CHAIN, first=VICTIM)
            await b.sent()
            b.forget_dram()
            b.shared.presence.forget()
            assert await b.load([space], CHAIN) == BLOCKS, f"{what}: the next store did not replace it"
            b.forget_dram()
            b.shared.presence.forget()
        for one in (a, b):
            one.check_end()
            await one.close()

    play(scenario)


@played
async def test_a_spoilt_pack_costs_what_is_spoilt(tmp_path: Path) -> None:
    store = MemoryStore(pack_blocks=4)
    a, b = host(store, tmp_path, "a"), host(store, tmp_path, "b")
    a.store(a.namespace(), CHAIN)
    await a.sent()
    name = names_of(a, CHAIN)[7]  # of blocks 4 to 7
    good = store.values[name]
    record = len(good) // 4
    bad = {
        "a bit of the second block": (changed(record + 500)(good), 5),
        "the blocks in another order": (good[:record] + good[2 * record :] + good[record : 2 * record], 5),
        "cut within the last block": (good[:-1], 7),
        "cut to one block": (good[:record], 5),
        "empty": (b"", 4),
        "another pack": (store.values[names_of(a, CHAIN)[11]], 4),
        "good": (good, BLOCKS),
    }
    for what, (value, found) in bad.items():
        store.values[name] = value
        assert await b.load([b.namespace()], CHAIN) <= found, what
        b.forget_dram()
        b.shared.presence.forget()
    assert await b.load([b.namespace()], CHAIN) == BLOCKS
    for one in (a, b):
        await one.close()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_block_comes_back_and_only_as_itself(monkeypatch: pytest.MonkeyPatch, codec: str, sealed: bool) -> None:
    monkeypatch.setattr(codecs, "_PAGE_BYTES", 64)  # rule: these blocks are small
    form, block = ValueForm(Cipher(KEY) if sealed else None, codecs.codec_number(codec)), b"abcd" * 1024
    whose = BlockIdentity(bytes(16), "ab" * 16, b"e" * 16, b"m" * 16, len(block))
    header, body = form.pack(whose, memoryview(block), memoryview(bytearray(form.body_bytes(len(block)))))
    assert announced_bytes(header) == len(body)
    assert announced_bytes(header[:-1]) == announced_bytes(bytes(HEADER_BYTES)) == 0
    others = BlockIdentity(b"k" * 16, *whose[1:]), BlockIdentity(*whose[:2], b"f" * 16, *whose[3:])
    for one, good in ((whose, True), (others[0], False), (others[1], False)):
        frame = memoryview(bytearray(len(block)))
        outcome = form.unpack(one, header, memoryview(bytearray(body)), frame)
        assert (outcome.name == "OK", bytes(frame) == block) == (good, good)
