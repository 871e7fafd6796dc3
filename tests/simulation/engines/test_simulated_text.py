"""Simulated models: the target's text depends on every token before it, the draft's ranks follow their law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.records import Sampling, SequenceSpec
from core.text.token_log import TokenLog, extended
from simulation.engines.texts import EOS, NEVER_RANKED, Agreement, SteadyLaw, Text

SPEC = SequenceSpec(3, Sampling(seed=5))
PROMPT = (3, 1, 4)


class OneLaw:
    """The same agreement everywhere."""

    def __init__(self, **changes):
        self.agreement = replace(Agreement(0, 0, 0, 1.0, 0.5), **changes)

    def at(self, seed, index, depth=0):
        return self.agreement

    def num_accepted_of_block(self, seed, index, num_guesses):
        return None


@given(st.lists(st.integers(1, 999), min_size=1, max_size=20), st.data())
def test_any_token_that_is_lost_repeated_or_changed_changes_what_follows(prompt, data):
    text = Text(SteadyLaw())
    right = text.plain(prompt, 5, 8)
    position = data.draw(st.integers(0, len(prompt) - 1))
    for wrong in (
        prompt[:position] + prompt[position + 1 :],
        [*prompt[: position + 1], *prompt[position:]],
        [*prompt[:position], prompt[position] % 999 + 1, *prompt[position + 1 :]],
    ):
        assert text.plain(wrong, 5, 8) != right
    assert text.plain(prompt, 6, 8) != right


def test_walking_a_tree_and_extending_a_log_lead_to_the_same_place():
    text, log = Text(SteadyLaw()), TokenLog(PROMPT)
    position = text.position(log, SPEC)
    for _ in range(20):
        token = position.next_token
        position = text.after(position, token)
        log.extend([token])
        assert replace(position, depth=0) == text.position(log, SPEC)
    assert position.depth == 20
    assert not text.after(position, position.next_token % 999 + 1).is_true


class DepthLaw(OneLaw):
    """The rank of the target's token is the number of guesses before it."""

    def at(self, seed, index, depth=0):
        return replace(self.agreement, rank=depth)


def test_agreement_is_that_of_the_number_of_guesses_since_the_text_that_the_draft_was_sent():
    text, log = Text(DepthLaw()), TokenLog(PROMPT)
    position = text.position(log, SPEC)
    for depth in range(5):
        assert text.coupled(position, 8).ranked.index(position.next_token) == depth
        log.extend([position.next_token])
        position = text.after(position, position.next_token)
    position = text.position(log, SPEC)
    assert text.coupled(position, 8).ranked[0] == position.next_token, "the draft has been sent what it had guessed"


@given(st.lists(st.integers(0, 4000), max_size=20), st.integers(0, 4000))
def test_a_hash_can_be_extended_without_the_log(tokens, token):
    log = TokenLog(tokens)
    before = log.base(len(log)).prefix_hash
    log.extend([token])
    assert log.base(len(log)).prefix_hash == extended(before, token)


@given(st.integers(0, 8), st.integers(1, 12), st.integers(8, 1000))
def test_candidates_are_different_and_the_right_one_has_its_rank(rank, num_ranks, vocab_size):
    text = Text(OneLaw(rank=rank), vocab_size=vocab_size)
    position = text.position(TokenLog(tuple(token % 7 for token in PROMPT)), SPEC)
    ranked = text.coupled(position, num_ranks).ranked
    assert len(set(ranked)) == len(ranked) == min(num_ranks, vocab_size - 4)
    assert all(0 < token < vocab_size for token in ranked)
    assert (ranked.index(position.next_token) if position.next_token in ranked else None) == (
        rank if rank < len(ranked) else None
    )


def test_off_the_text_no_candidate_is_ever_right():
    text = Text(OneLaw(rank=0))
    position = text.position(TokenLog(PROMPT), SPEC)
    astray = text.after(position, position.next_token % 999 + 1)
    assert astray.next_token not in text.coupled(astray, 30).ranked
    assert text.sampled(astray, is_right=True).sampled != astray.next_token


@pytest.mark.parametrize("is_right", [True, False])
def test_a_sample_is_right_or_wrong_as_tossed(is_right):
    text = Text(OneLaw(plain_rank=2))
    position = text.position(TokenLog(PROMPT), SPEC)
    said = text.sampled(position, is_right=is_right)
    assert (said.sampled == position.next_token) is is_right
    assert said.q.token_ids == (said.sampled,)


def test_a_steady_law_keeps_to_its_shares():
    law = SteadyLaw((0.7, 0.2), (0.5,), alpha=0.6)
    agreements = [law.at(seed, index) for seed in range(50) for index in range(200)]
    ranks, plain = Counter(a.rank for a in agreements), Counter(a.plain_rank for a in agreements)
    assert ranks[0] / 10_000 == pytest.approx(0.7, abs=0.02)
    assert ranks[1] / 10_000 == pytest.approx(0.2, abs=0.02)
    assert ranks[NEVER_RANKED] / 10_000 == pytest.approx(0.1, abs=0.02)
    assert plain[0] / 10_000 == pytest.approx(0.5, abs=0.02)
    text, log, num_accepted = Text(law), TokenLog(PROMPT), 0
    for _ in range(4000):
        position = text.position(log, SPEC)
        num_accepted += text.is_accepted(position)
        log.extend([position.next_token])
    assert num_accepted / 4000 == pytest.approx(0.6, abs=0.03)


def test_a_text_ends_as_often_as_it_is_told_to():
    tokens = Text(SteadyLaw(), eos_share=0.1).plain(PROMPT, 5, 5000)
    assert tokens.count(EOS) / 5000 == pytest.approx(0.1, abs=0.02)
    assert EOS not in Text(SteadyLaw()).plain(PROMPT, 5, 1000)
