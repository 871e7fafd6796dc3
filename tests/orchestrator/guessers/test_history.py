"""Recent outputs of one caller: looked up like the text, in bounded memory, and of each domain by itself."""

from __future__ import annotations

import random
import tracemalloc
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.speculation import NO_GUESSES, ROOT, SourcePrecision
from orchestrator.guessers.registry import Guessers, OutputForm
from orchestrator.guessers.suffix import history as module
from orchestrator.guessers.suffix.history import Histories, History
from orchestrator.guessers.suffix.suffix_array import MAX_MATCH, MIN_MATCH
from orchestrator.guessers.suffix.suffix_index import SuffixIndex

TOKENS = st.integers(0, 2)


def remembering(*outputs, max_tokens=10_000):
    history = History(max_tokens)
    for output in outputs:
        history.add(output, 0)
    return history


def match_of(output, place, ending):
    match = 0
    while match < min(place, len(ending), MAX_MATCH) and output[place - 1 - match] == ending[-1 - match]:
        match += 1
    return match


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=30), max_size=6), st.lists(TOKENS, max_size=25))
def test_the_best_places_of_all_outputs_are_found_and_none_reaches_into_another(outputs, ending):
    places = [(output, place) for output in outputs for place in range(1, len(output))]
    by_hand = [(match_of(output, place, ending), output[place : place + 4]) for output, place in places]
    matches = sorted((match for match, _ in by_hand if match >= MIN_MATCH), reverse=True)
    found = list(remembering(*outputs).continuations(ending, 8, 4))
    assert [match for match, _ in found] == matches[:8]
    assert all(each in by_hand for each in found)


def test_an_output_s_beginning_is_found_by_the_end_of_its_prompt():
    history, prompt = History(1000), [*range(100, 200), 1, 2]
    history.add([*prompt, 3, 4, 5], len(prompt))
    assert list(history.continuations([90, 1, 2], 8, 4)) == [(2, [3, 4, 5])]
    assert not list(history.continuations([100, 101, 102], 8, 4)), "more of the prompt is not kept"


def test_the_more_outputs_agree_the_likelier_is_a_continuation():
    index = SuffixIndex(1, remembering([1, 2, 7], [5, 1, 2, 8], [1, 2, 7]))
    found = index.propose([9, 1, 2])
    chances = dict(zip(found.tokens, found.chances, strict=True))
    assert chances == pytest.approx({7: 2 / 3, 8: 1 / 3})
    assert set(found.parents) == {ROOT}


def test_a_place_of_the_text_has_a_vote_like_one_of_an_output():
    found = SuffixIndex(1, remembering([1, 2, 7])).propose([1, 2, 8, 1, 2])
    assert dict(zip(found.tokens, found.chances, strict=True)) == {8: 0.5, 7: 0.5}


def test_places_that_match_far_less_than_the_best_have_no_vote_wherever_they_are():
    index = SuffixIndex(1, remembering([1, 2, 3, 4, 5, 7], [4, 5, 8]))
    assert index.propose([4, 5, 9, 1, 2, 3, 4, 5]).tokens == (7,)


def test_what_has_ended_is_found_by_another_and_not_before():
    history = History(1000)
    first, second = SuffixIndex(4, history, prompt_len=2), SuffixIndex(4, history, prompt_len=2)
    text = [1, 2, 3, 4, 5, 6]
    first.propose(text)
    assert second.propose([1, 2]) == NO_GUESSES
    first.ended(text)
    assert second.propose([1, 2]).tokens == (3, 4, 5, 6)


def test_one_look_up_indexes_no_more_than_its_share():
    history, indexed = remembering([*range(1000)]), [0]
    while indexed[-1] < 998:
        found = list(history.continuations([997, 998], 8, 4))
        indexed.append(sum(len(part._array) for part in history._parts))
        assert 0 < indexed[-1] - indexed[-2] <= module.MAX_INDEXED_PER_LOOKUP
    assert found == [(2, [999])]


def test_an_output_that_is_longer_than_the_room_is_kept_by_its_end():
    history = remembering([*range(1000)], max_tokens=200)
    assert len(history) <= 200
    assert not list(history.continuations([500, 501], 8, 4))
    assert list(history.continuations([990, 991], 8, 4)) == [(2, [992, 993, 994, 995])]


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 9, 40])
def test_there_may_be_room_for_hardly_anything(max_tokens):
    history = History(max_tokens)
    for length in range(60):
        history.add([*range(length)], 0)
        assert len(history) <= max(max_tokens, MIN_MATCH * module.NUM_PARTS)
        list(history.continuations([1, 2], 8, 4))


def test_an_output_without_tokens_is_not_kept():
    history = History(1000)
    history.add([1, 2, 3], 3)
    assert len(history) == MIN_MATCH


def test_nobody_who_is_not_told_apart_has_a_history():
    assert Histories(1000, 8).of("") is None
    assert Histories(0, 8).of("a") is None
    assert Histories().of("a") is None


def test_each_domain_has_its_own_and_the_least_recent_is_forgotten():
    histories = Histories(1000, 2)
    a, b = histories.of("a"), histories.of("b")
    a.add([1, 2, 3], 0)
    b.add([1, 2, 4], 0)
    assert histories.of("a") is a
    assert list(a.continuations([1, 2], 8, 1)) == [(2, [3])]
    histories.of("c")
    assert histories.of("a") is a
    assert histories.of("b") is not b
    assert not list(histories.of("b").continuations([1, 2], 8, 1))


@pytest.mark.parametrize(("first", "second"), [*product(("caller:a", "tenant:a", "caller:b", ""), repeat=2)])
def test_a_session_is_guessed_by_outputs_of_its_own_domain_alone(first, second):
    guessers, text = Guessers(histories=Histories(1000, 8)), [1, 2, 3, 4, 5, 6]

    def panel(isolation):
        form = OutputForm(2, isolation=isolation)
        return guessers.panel(["prompt_lookup", "suffix"], SpeculationConfig(), 4, SourcePrecision(), 50, form)

    panel(first).ended(text)
    proposals = dict(panel(second).ask(text[:2]))
    if first == second != "":
        assert proposals.pop("suffix").tokens == (3, 4, 5, 6)
    assert proposals == {}, "of a text without repetition nobody can guess anything"


def test_only_the_suffix_guesser_keeps_outputs():
    guessers = Guessers(histories=Histories(1000, 8))
    for name in ("prompt_lookup", "ngram", "lookahead"):
        guessers.panel([name], SpeculationConfig(), 4, SourcePrecision(), 50, OutputForm(2, isolation="a")).ended(
            [1] * 9
        )
    assert not guessers._histories._by_domain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"suffix_history_tokens": -1}, r"suffix_history_tokens must be in \[0, 1048576\]"),
        ({"suffix_history_tokens": 2**20 + 1}, r"suffix_history_tokens must be in \[0, 1048576\]"),
        ({"suffix_history_callers": 0}, r"suffix_history_callers must be in \[1, 4096\]"),
        ({"suffix_history_callers": 4097}, r"suffix_history_callers must be in \[1, 4096\]"),
    ],
)
def test_a_bad_bound_is_refused_by_name(changes, said):
    with pytest.raises(ConfigError, match=said):
        SpeculationConfig(**changes)


@pytest.mark.ci
def test_a_million_tokens_of_many_callers_leave_it_within_its_bounds():
    dice, most, num_domains = random.Random(7), 2048, 5
    histories, num_tokens, text = Histories(most, num_domains), 0, list[int]()
    while num_tokens < 10**6:
        history = histories.of(f"caller:{dice.randrange(12)}")
        index = SuffixIndex(8, history, prompt_len=3)
        text = [*text[-40:], *(dice.randrange(300) for _ in range(dice.randrange(1, 600)))]
        for end in (3, len(text) // 2, len(text)):
            index.propose(text[:end]).check(vocab_size=300)
        index.ended(text)
        num_tokens += len(text)
        assert len(histories._by_domain) <= num_domains
        for each in histories._by_domain.values():
            assert len(each) <= most
            assert sum(len(part._array) for part in each._parts) <= len(each)
            assert all(len(part._array._ends) <= len(part._array) for part in each._parts)


def test_a_token_takes_no_more_bytes_than_the_setting_says():
    """Most where hardly any two tokens come twice: each pair has a place of its own."""
    dice, most = random.Random(3), 4096
    tracemalloc.start()
    history = History(most)
    for _ in range(most // 500):
        history.add([dice.randrange(150_000) for _ in range(500)], 0)
    for _ in range(most // module.MAX_INDEXED_PER_LOOKUP + 1):
        list(history.continuations([1, 2], 8, 8))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 250 * most
