"""Where prefills are cut, and which hits may be used."""

from __future__ import annotations

import pytest

from tiercache.engine.sampling import SamplingParams
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import EngineSettings
from tiercache.protocol.keys import root_key

pytestmark = pytest.mark.engine
ROOT = root_key("sequence")
EXACT = EngineSettings(block_size=4, chunk_size=16)


def sequence_of(length: int, settings: EngineSettings) -> Sequence:
    return Sequence(0, list(range(1, length + 1)), SamplingParams(), ROOT, settings)


def edges(sequence: Sequence) -> list[int]:
    found = []
    while sequence.prefilling:
        sequence.computed = sequence.edge_after(sequence.computed)
        found.append(sequence.computed)
    return found


def test_what_was_decoded_into_a_quantised_pool_is_computed_again_with_its_own_block_raw() -> None:
    sequence = sequence_of(6, EngineSettings(block_size=4, chunk_size=16, kv_cache_dtype="int8"))
    sequence.tokens += range(7, 19)
    # When they were decoded, tokens 7, 11 and 15 were the last in their blocks and saw them full, the others raw.
    assert edges(sequence) == [4, 6, 7, 11, 15, 18]
    loose = sequence_of(6, EngineSettings(block_size=4, chunk_size=16, kv_cache_dtype="int8", exact=False))
    loose.tokens += range(7, 19)
    assert edges(loose) == [16, 18]


def test_preempted_sequences_have_keys_of_their_own() -> None:
    sequence, twin = sequence_of(39, EXACT), sequence_of(39, EXACT)
    for one in (sequence, twin):
        one.tokens += range(40, 47)
        one.computed = 45
        one.key_all_full_blocks()
    assert len(sequence.chain) == len(twin.chain) == 11
    assert sequence.chain.packed(9) == twin.chain.packed(9)
    assert {sequence.chain.key(9), sequence.chain.key(10)}.isdisjoint({twin.chain.key(9), twin.chain.key(10)})
    assert sequence.max_hit_blocks == 11
    assert [sequence.usable_hit_blocks(found) for found in (3, 8, 9, 10, 11)] == [0, 8, 9, 10, 11]
    assert sequence.first_private_block == 9


def test_what_is_computed_again_has_no_key_of_the_old_bytes() -> None:
    sequence = sequence_of(39, EXACT)
    prompt_keys = sequence.chain.packed()
    sequence.tokens += range(40, 47)
    sequence.computed = 45
    sequence.key_all_full_blocks()
    old = sequence.chain
    sequence.restart()
    sequence.computed = 40  # of the two blocks behind the prompt's nine, one was found again
    sequence.drop_lost_keys()
    assert sequence.chain.packed() == old.packed(10)
    sequence.computed = 46
    sequence.preemptions += 1
    sequence.key_all_full_blocks()
    assert sequence.chain.packed(10) == old.packed(10)
    assert sequence.chain.key(10) != old.key(10)
    sequence.computed = 16
    sequence.drop_lost_keys()
    assert sequence.chain.packed() == prompt_keys
