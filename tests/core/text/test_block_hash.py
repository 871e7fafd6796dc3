"""Equal names of blocks mean equal tokens, from the first on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.text.block_hash import HASH_BYTES, block_hashes


def test_hashes_name_a_block_and_all_before_it():
    tokens = [*range(150_000, 150_010)]
    hashes = block_hashes(tokens, 4)
    assert len(hashes) == len(set(hashes)) == 2
    other = block_hashes([99, *tokens[1:]], 4)
    assert set(hashes).isdisjoint(other), "the second block is the same, and follows from something else"
    repeated = block_hashes([7] * 8, 4)
    assert repeated[0] != repeated[1]
    assert {len(each) for each in hashes} == {HASH_BYTES}


def test_a_root_stands_for_other_weights():
    tokens = [*range(8)]
    names = [block_hashes(tokens, 4, root=root) for root in (b"", b"one", b"other")]
    assert len({name for each in names for name in each}) == 6
    assert block_hashes(tokens, 4, names[1][:1], b"one") == names[1]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5), st.data())
def test_there_is_one_for_each_whole_block_and_what_is_known_is_kept(tokens, block_tokens, data):
    hashes = block_hashes(tokens, block_tokens)
    assert len(hashes) == len(tokens) // block_tokens
    num_known = data.draw(st.integers(0, len(hashes)))
    assert block_hashes(tokens[: num_known * block_tokens], block_tokens) == hashes[:num_known]
    assert block_hashes(tokens, block_tokens, hashes[:num_known]) == hashes
