"""Where prefills are cut, and which hits may be used."""

from __future__ import annotations

import pytest

from tiercache.engine.block_table import NO_BLOCK
from tiercache.engine.sampling import SamplingParams
from tiercache.engine.sequence import Sequence
from tiercache.engine.settings import EngineSettings
from tiercache.engine.window import Window
from tiercache.errors import ConfigError
from tiercache.protocol.keys import KeyChain, root_key

pytestmark = pytest.mark.engine
ROOT = root_key("sequence")
EXACT = EngineSettings(block_size=4, chunk_size=16)
LOOSE = EngineSettings(block_size=4, chunk_size=16, exact=False)


def sequence_of(length: int, settings: EngineSettings) -> Sequence:
    return Sequence(0, list(range(1, length + 1)), SamplingParams(), ROOT, settings)


def edges(sequence: Sequence) -> list[int]:
    found = []
    while sequence.prefilling:
        sequence.computed = sequence.edge_after(sequence.computed)
        found.append(sequence.computed)
    return found


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [1]),
        (4, [4]),
        (5, [4, 5]),
        (16, [12, 16]),
        (17, [16, 17]),
        (20, [16, 20]),
        (21, [16, 20, 21]),
        (32, [16, 28, 32]),
        (39, [16, 32, 36, 39]),
    ],
)
def test_exact_chunks_end_at_multiples_and_at_the_last_block(length: int, expected: list[int]) -> None:
    assert edges(sequence_of(length, EXACT)) == expected


def test_loose_chunks_end_at_multiples() -> None:
    assert edges(sequence_of(39, LOOSE)) == [16, 32, 39]


def test_what_was_decoded_into_a_quantised_pool_is_computed_again_with_its_own_block_raw() -> None:
    sequence = sequence_of(6, EngineSettings(block_size=4, chunk_size=16, kv_cache_dtype="int8"))
    sequence.tokens += range(7, 19)
    # When they were decoded, tokens 7, 11 and 15 were the last in their blocks and saw them full, the others raw.
    assert edges(sequence) == [4, 6, 7, 11, 15, 18]
    loose = sequence_of(6, EngineSettings(block_size=4, chunk_size=16, kv_cache_dtype="int8", exact=False))
    loose.tokens += range(7, 19)
    assert edges(loose) == [16, 18]


def test_decoding_goes_on_token_by_token() -> None:
    sequence = sequence_of(6, EXACT)
    sequence.computed = 6
    sequence.tokens.append(7)
    assert not sequence.prefilling
    assert sequence.edge_after(6) == 7


@pytest.mark.parametrize(("found", "usable"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 9), (10, 9)])
def test_exact_hits_are_rounded_down_to_an_edge(found: int, usable: int) -> None:
    sequence = sequence_of(39, EXACT)  # 9 full blocks before the last edge at 36
    assert sequence.usable_hit_blocks(found) == usable


def test_a_hit_never_covers_the_last_token() -> None:
    assert sequence_of(32, LOOSE).usable_hit_blocks(8) == 7
    assert sequence_of(33, LOOSE).usable_hit_blocks(8) == 8


def test_exact_keys_tell_the_split() -> None:
    plain = KeyChain(ROOT, 4, range(1, 40))
    at_28, at_32, at_39 = (sequence_of(length, EXACT).chain for length in (28, 32, 39))
    # 28 tokens are cut at 24, 32 at 28: the blocks after 16 are different blocks.
    assert [len(chain) for chain in (at_28, at_32, at_39)] == [6, 7, 9]
    assert at_28.key(3) == at_32.key(3) == at_39.key(3) == plain.key(3)
    assert len({at_28.key(4), at_32.key(4), at_39.key(4)}) == 3
    assert at_39.key(4) == plain.key(4)  # a whole chunk
    assert sequence_of(31, EXACT).chain.packed() == at_32.packed()  # both are cut at 28


def test_loose_keys_go_on_with_what_is_generated() -> None:
    sequence = sequence_of(6, LOOSE)
    assert len(sequence.chain) == 1
    sequence.tokens += [7, 8, 9]
    sequence.computed = 9
    assert sequence.keyed_full_blocks() == 2
    sequence.tokens += [10, 11, 12, 13]
    sequence.computed = 12
    assert sequence.keyed_full_blocks() == 3
    assert sequence.chain.packed() == KeyChain(ROOT, 4, range(1, 13)).packed()


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


def test_what_is_computed_again_is_cut_as_before() -> None:
    sequence = sequence_of(39, EXACT)
    sequence.tokens += range(40, 60)
    assert edges(sequence) == [16, 32, 36, 39, 48, 59]
    sequence.computed = 44
    assert edges(sequence) == [48, 59]
    sequence.computed = 58
    assert not sequence.prefilling


def test_without_prefix_caching_no_two_sequences_share_a_key() -> None:
    alone = EngineSettings(block_size=4, chunk_size=16, enable_prefix_caching=False)
    one, other = sequence_of(39, alone), sequence_of(39, alone)
    assert len(one.chain) == len(other.chain) == 9
    assert one.chain.key(0) != other.chain.key(0)
    assert one.first_private_block == 0


def test_blocks_are_taken_from_the_end() -> None:
    sequence = sequence_of(6, EXACT)
    sequence.tables[0].ids = [3, 4, 5, 7]
    assert sequence.tables[0].take(keep=2) == [5, 7]
    assert sequence.tables[0].ids == [3, 4]
    assert sequence.take_blocks() == [3, 4]


def test_blocks_of_the_same_tokens_are_given_back_together() -> None:
    windows = (Window(4), Window(4, 4), Window(4))
    sequence = Sequence(0, list(range(1, 12)), SamplingParams(), ROOT, EXACT, windows=windows)
    ids = ([1, 2, 3], [NO_BLOCK, 8, 9], [4, 5, 6])
    for table, own in zip(sequence.tables, ids, strict=True):
        table.ids = own
    assert sequence.held_blocks == [1, 2, 3, 8, 9, 4, 5, 6]
    assert sequence.take_blocks() == [1, 4, 2, 8, 5, 3, 9, 6]  # the one that goes first is at the end
    assert sequence.held_blocks == []


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"block_size": 0}, "block_size is 0: must be at least 1"),
        ({"chunk_size": 40, "block_size": 16}, "chunk_size is 40: must be a multiple of block_size 16"),
        ({"write": "never"}, "write is 'never': must be one of through, back"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype is 'int3': must be one of auto, fp8, fp8_e4m3"),
        ({"kv_cache_memory": "many"}, "kv_cache_memory 'many' is not understood: write for example 16GiB"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens is 512: must be at least 576, a chunk_size of"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5: must be above 0 and at most 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2: this engine runs on one device; set it to 1"),
        ({"load_timeout_s": 0.0}, "load_timeout_s is 0.0: must be above 0"),
        ({"clean_blocks": -1}, "clean_blocks is -1: must be 0 or more"),
    ],
)
def test_wrong_settings_are_named(setting: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineSettings(**setting)
