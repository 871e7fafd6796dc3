"""Equal length and equal hash mean equal tokens, through any growth and truncation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from core.records import Base
from core.text.token_log import EMPTY_HASH, TokenLog

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@settings(deadline=None)
@given(tokens=token_lists, cut=st.integers(0, 30))
def test_hash_depends_on_the_tokens_and_not_on_how_they_came(tokens, cut):
    cut = min(cut, len(tokens))
    grown = TokenLog(tokens[:cut])
    grown.extend(tokens[cut:])
    detour = TokenLog([*tokens[:cut], 5, 6, 7])
    detour.truncate(cut)
    detour.extend(tokens[cut:])
    bases = [[log.base(n) for n in range(len(tokens) + 1)] for log in (TokenLog(tokens), grown, detour)]
    assert bases[0] == bases[1] == bases[2]
    assert list(detour.tokens) == tokens


@settings(deadline=None)
@given(ours=token_lists, theirs=token_lists)
def test_a_base_is_held_exactly_when_it_is_a_prefix(ours, theirs):
    log, other = TokenLog(ours), TokenLog(theirs)
    for num_tokens in range(len(theirs) + 1):
        assert log.holds(other.base(num_tokens)) == (ours[:num_tokens] == theirs[:num_tokens])


def test_token_zero_and_order_change_the_hash():
    hashes = [TokenLog(tokens).base(len(tokens)).prefix_hash for tokens in ([], [0], [0, 0], [1, 2], [2, 1])]
    assert len(set(hashes)) == len(hashes)
    assert hashes[0] == EMPTY_HASH


def test_empty_log_holds_the_empty_base_and_no_other():
    log = TokenLog()
    assert log.holds(Base(0, EMPTY_HASH))
    assert not log.holds(Base(0, EMPTY_HASH + 1))
    assert not log.holds(Base(1, EMPTY_HASH))
    assert len(log) == 0


@settings(deadline=None)
@given(tokens=token_lists, start=st.integers(0, 30), others=token_lists)
def test_common_prefix_is_counted_from_the_start_given(tokens, start, others):
    length = TokenLog(tokens).common_prefix_len(start, others)
    assert tokens[start : start + length] == others[:length]
    assert start + length >= len(tokens) or length == len(others) or tokens[start + length] != others[length]


def test_since_gives_what_follows():
    log = TokenLog([4, 5, 6])
    assert log.since(1) == (5, 6)
    assert log.since(3) == ()
