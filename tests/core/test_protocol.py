"""Outcomes of messages, worked out by hand; a token tree is written as (token, parent) pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core import protocol
from core.protocol import EndedSessions, HeldTokens, missing_of, refusal_of
from core.records import (
    Base,
    DraftRequest,
    Missing,
    Sampling,
    SequenceSpec,
    Stamp,
    Verification,
    VerifyRequest,
)
from core.speculation.candidates import Candidates
from core.speculation.growth import Measure, TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK, ROOT, SparseDistribution, TokenTree
from core.text.token_log import TokenLog

EPOCH, VOCAB_SIZE = 3, 100
SPEC = SequenceSpec(2, Sampling(temperature=0.0))
SAMPLED = SequenceSpec(2, Sampling(temperature=1.0, seed=1), Verification.REJECTION)
TREE_SPEC = TreeSpec(rows_per_pass=4, max_depth=6, calibration=(0.0, 1.0), tail=(0.5, 0.25))
STAMP = Stamp("s", EPOCH, 5)
CHAIN = TreeSpec.chain(2)
FORK = TokenTree((7, 8), (ROOT, ROOT))


def held(*tokens, spec=SPEC, guesses=(), last_round=4):
    """Tokens that an engine holds, and guesses below them: (token, parent) each; all of them have been fed."""
    known = HeldTokens(spec, TokenLog(tokens), last_round=last_round)
    known.tree.root = said(0)
    for token, parent in guesses:
        known.tree.add(parent, token, said(token))
    return known


def said(token):
    """The draft's candidates after `token`: the next one, and the one after it."""
    return Candidates((token + 1, token + 2), 0.75, shares=(0.75, 0.25))


def base(*tokens):
    return TokenLog(tokens).base(len(tokens))


def verify(before=(), suffix=(1, 2), block=EMPTY_BLOCK, spec=None):
    return VerifyRequest(STAMP, base(*before), suffix, block, spec or (None if before else SPEC))


def draft(before=(), suffix=(1, 2), growth=CHAIN, spec=None):
    return DraftRequest(STAMP, base(*before), suffix, growth, spec or (None if before else SPEC))


def refusal(request, of=None, *, epoch=EPOCH, has_ended=False):
    refused = refusal_of(request, of, epoch=epoch, has_ended=has_ended, vocab_size=VOCAB_SIZE)
    assert refused is None or refused.stamp == request.stamp
    return refused and refused.reason


# Which messages change nothing


def test_a_message_that_is_due_is_not_refused():
    assert refusal(verify()) is None
    assert refusal(verify((1, 2), (3,), FORK), held(1, 2)) is None
    assert refusal(draft((1, 2), (3,)), held(1, 2)) is None


@pytest.mark.parametrize(("last_round", "is_refused"), [(4, False), (5, True), (6, True)])
def test_a_round_is_taken_once_and_none_after_a_later_one(last_round, is_refused):
    reason = refusal(verify((1, 2), (3,)), held(1, 2, last_round=last_round))
    assert (reason == protocol.OVERTAKEN) is is_refused


def test_what_is_stale_is_named_before_what_is_malformed_and_the_incarnation_first():
    malformed, known = verify((1, 2), ()), held(1, 2, last_round=9)
    assert "another incarnation" in refusal(malformed, known, epoch=EPOCH + 1, has_ended=True)
    assert refusal(malformed, known, has_ended=True) == protocol.ENDED
    assert refusal(malformed, known) == protocol.OVERTAKEN


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (verify(suffix=()), "lacks a suffix"),
        (replace(verify(), spec=None), "lacks a suffix, or a first one its sampling parameters"),
        (verify(suffix=(1, -1)), "a token id"),
        (verify(suffix=(VOCAB_SIZE, 1)), "a token id"),
        (verify(block=TokenTree.chain((1, VOCAB_SIZE))), "a guess"),
        (verify(block=TokenTree.chain((-1,))), "a guess"),
        (draft(suffix=(VOCAB_SIZE,)), "a token id"),
        (verify(block=FORK, spec=SAMPLED), "chains only"),
        (draft(growth=TREE_SPEC, spec=SAMPLED), "a length that is fixed beforehand"),
    ],
)
def test_what_cannot_be_computed_is_refused(request_, reason):
    assert reason in refusal(request_)


def test_what_is_known_of_sampling_counts_where_a_message_says_nothing_of_it():
    assert "chains only" in refusal(verify((1, 2), (3,), FORK), held(1, 2, spec=SAMPLED))
    assert "a length that is fixed beforehand" in refusal(
        draft((1, 2), (3,), growth=TREE_SPEC), held(1, 2, spec=SAMPLED)
    )
    assert refusal(verify(block=FORK), held(1, 2, spec=SAMPLED)) is None, "but a first message says it anew"
    assert "chains only" in refusal(verify((1, 2), (3,), FORK, spec=SPEC), held(1, 2, spec=SAMPLED)), "no other does"


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True),
        ({"reports_all": True}, True),
        ({"measure": Measure.ENTROPY}, True),
        ({"num_passes": 0}, False),
        ({"num_passes": 1}, False),
        ({"min_path_prob": 0.1}, False),
        ({"min_confidence": 0.1}, False),
        ({"calibration": (0.0, 1.0)}, False),
        ({"rows_per_pass": 2}, False),
        ({"fanout": 2}, False),
    ],
)
def test_how_long_a_draft_draws_must_not_depend_on_what_it_draws(verification, changes, is_taken):
    """A block that takes too long is not used: were it long for what was drawn, that draw would be rarer."""
    growth = replace(TreeSpec.chain(3), **changes)
    reason = refusal(draft(growth=growth, spec=replace(SAMPLED, verification=verification)))
    assert reason is None if is_taken else "a length that is fixed beforehand" in reason


@pytest.mark.parametrize("growth", [TREE_SPEC, replace(TREE_SPEC, num_passes=2)])
def test_a_greedy_draft_may_grow_without_end_under_every_verification(growth):
    greedy = replace(SAMPLED, sampling=Sampling(temperature=0.0))
    assert refusal(draft(growth=growth, spec=greedy)) is None


def test_of_many_ended_sessions_the_first_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_ENDED", 2)
    ended = EndedSessions()
    for name in "abc":
        ended.add(name)
    assert [name in ended for name in "abcd"] == [False, True, True, False]


# Which bases are missing


@pytest.mark.parametrize(
    ("before", "of", "missing"),
    [
        ((), None, None),  # the first message
        ((), (1, 2), None),  # everything once more
        ((1, 2), (1, 2), None),
        ((1, 2), (1, 2, 3), None),  # holds more
        ((1, 2), None, 0),
        ((1, 2), (), 0),
        ((1, 2, 3), (1, 2), 2),  # behind: the rest will do
        ((1, 2, 3), (9,), 1),  # behind, with what may be wrong: the next base tells
        ((1, 2), (1, 9), 0),  # something else
        ((1, 2), (9, 2, 3), 0),
    ],
)
def test_missing_says_how_much_may_still_be_right(before, of, missing):
    answer = missing_of(verify(before, (5,)), None if of is None else held(*of))
    assert answer == (None if missing is None else Missing(STAMP, missing))


def test_a_base_is_known_by_its_hash_not_by_its_length():
    request = replace(verify((1, 2), (5,)), base=Base(2, 12345))
    assert missing_of(request, held(1, 2)) == Missing(STAMP, 0)


# How far a message cuts


@pytest.mark.parametrize(
    ("tokens", "before", "suffix", "num_kept", "pending"),
    [
        ((), (), (1, 2), 0, [1, 2]),
        ((1, 2), (1, 2), (3, 4), 2, [3, 4]),
        ((1, 2, 3), (1, 2), (3, 4), 3, [4]),  # a part of the suffix is held
        ((1, 2, 9, 9), (1, 2), (3, 4), 2, [3, 4]),  # something else is held there
        ((1, 2, 3, 4), (1, 2), (3, 4), 3, [4]),  # all is held: the last is computed again
        ((1, 2, 3, 4), (1,), (2, 3), 2, [3]),  # and more than that
        ((1, 2), (), (1, 2), 1, [2]),
    ],
)
def test_a_target_keeps_what_agrees_and_computes_the_last_token(tokens, before, suffix, num_kept, pending):
    known = held(*tokens)
    rebased = known.rebase_to_verify(verify(before, suffix))
    assert (rebased.num_tokens, list(rebased.guesses), rebased.pending) == (num_kept, [], pending)
    assert [*known.log.tokens, *pending] == [*before, *suffix]


GUESSES = ((7, ROOT), (8, ROOT), (9, 0), (10, 2))
"""7 9 10, and 8 beside them; their rows are 0, 1, 2, 3."""


def test_guesses_that_were_committed_stay_and_no_others():
    known = held(1, 2, guesses=GUESSES)
    rebased = known.rebase_to_verify(verify((1, 2), (7, 9, 5)))
    assert (rebased.num_tokens, list(rebased.guesses), rebased.pending) == (2, [0, 2], [5])
    assert (list(known.log.tokens), known.tree.tokens, known.tree.root) == ([1, 2, 7, 9], [], None)


def test_guesses_below_tokens_that_were_wrong_are_forgotten():
    known = held(1, 2, guesses=GUESSES)
    rebased = known.rebase_to_grow(draft((1,), (3, 7)), CHAIN)
    assert (rebased.num_tokens, list(rebased.guesses), rebased.pending) == (1, [], [3, 7])
    assert known.tree.tokens == []


def test_the_root_is_computed_again_where_nobody_knows_what_is_said_after_it():
    known = held(1, 2)
    known.tree.root = None
    assert known.rebase_to_grow(draft((1,), (2,)), CHAIN).pending == [2]
    assert known.log.tokens == [1]


def test_other_sampling_parameters_forget_the_guesses_and_keep_the_tokens():
    known = held(1, 2, guesses=GUESSES)
    known.take_spec(replace(SPEC))
    assert len(known.tree) == 4, "the same once more"
    known.take_spec(SAMPLED)
    assert (len(known.tree), known.tree.root, known.log.tokens, known.spec) == (0, None, [1, 2], SAMPLED)


# Steady growth


def growing():
    """1 2, below it 1 (fed) and 2; below that 1 again 2 and 3."""
    known = held(5)
    known.rebase_to_grow(draft((5,), (6,), growth=TREE_SPEC), TREE_SPEC)
    known.log.extend([6])
    feed(known, said(0))
    known.builder.feed()
    feed(known, said(1))
    return known


def feed(known, *what_is_said):
    """Nodes that the tree builder has had fed were computed."""
    known.hold(what_is_said)
    known.builder.take(what_is_said)


def children_of_root(known):
    return [known.builder.tokens[child] for child in known.builder.children(0)]


def test_growth_goes_on_below_what_was_committed():
    known = growing()
    rebased = known.rebase_to_grow(draft((5, 6), (1,), growth=TREE_SPEC), TREE_SPEC)
    assert (rebased.num_tokens, list(rebased.guesses), rebased.pending) == (2, [0], [])
    assert children_of_root(known) == [2, 3]
    assert known.tree.root == said(1)


def test_what_was_fed_is_held_below_its_parent_whatever_was_committed_meanwhile():
    known = growing()
    feed_some(known)
    known.rebase_to_grow(draft((5, 6), (1,), growth=TREE_SPEC), TREE_SPEC)
    assert_held(known)
    feed_some(known)


def feed_some(known):
    """In another order than they were found."""
    for _ in range(8):
        known.builder.feed()
        feed(known, Candidates((1, 2), 0.7))
    assert list(known.builder.rows) != sorted(known.builder.rows)
    assert_held(known)


def assert_held(known):
    """The held tree has just the nodes that were fed, each where its path leads."""
    fed = [known.builder.path(node) for node in known.builder.rows if node]
    assert [known.tree.walk(path)[-1] for path in fed] == list(range(len(known.tree)))


def test_a_committed_guess_that_nobody_has_fed_is_pending():
    known = growing()
    assert known.rebase_to_grow(draft((5, 6), (2,), growth=TREE_SPEC), TREE_SPEC).pending == [2]
    assert not known.builder.has_root


@pytest.mark.parametrize(
    ("before", "suffix", "pending", "children"),
    [
        ((5,), (7,), [7], []),  # another token was committed
        ((5, 6), (9,), [9], []),  # one that nobody guessed
        ((), (5, 6), [], [1, 2]),  # everything once more: what is said after it is still known
    ],
)
def test_growth_begins_anew_where_the_text_left_it_or_is_sent_as_a_whole(before, suffix, pending, children):
    known = growing()
    rebased = known.rebase_to_grow(draft(before, suffix, growth=TREE_SPEC), TREE_SPEC)
    assert (rebased.pending, children_of_root(known)) == (pending, children)
    assert [*known.log.tokens, *pending] == [*before, *suffix]
    assert len(known.tree) == 0


def test_who_has_lost_what_was_told_is_told_again():
    known = growing()
    num_reported = len(known.builder.report())
    anew = replace(TREE_SPEC, reports_all=True)
    known.rebase_to_grow(draft((5,), (6,), growth=anew), anew)
    assert len(known.builder.report()) == num_reported > 0


# Draws


Q = SparseDistribution((7, 8), (0.5, 0.5))


def drawing(num_drawn, verification=Verification.REJECTION):
    """5 6, and below it so many draws: 10, 11, ... of which all but the last are fed, as a chain in turn leaves it."""
    known = held(5, spec=replace(SAMPLED, verification=verification))
    known.rebase_to_grow(draft((5,), (6,)), TreeSpec.chain(num_drawn))
    known.log.extend([6])
    for place in range(num_drawn):
        drawn = [replace(said(0), sampled=10 + place, q=Q)]
        known.hold(drawn)
        known.builder.take(drawn)
        known.builder.feed_pass(1)
    known.builder.put_back()
    assert known.builder.report().tokens.tolist() == [10 + place for place in range(num_drawn)]
    return known


@pytest.mark.parametrize(
    ("suffix", "num_tokens", "guesses", "pending"),
    [
        ((9,), 2, [], [9]),  # the first draw was rejected
        ((10, 9), 2, [0], [9]),  # the second
        ((10, 11, 12, 9), 2, [0, 1], [12, 9]),  # none: the last of them was not fed
        ((10, 11), 2, [0], [11]),  # the text ends at a node that was fed, and said something that was drawn at row 2
        ((10,), 2, [], [10]),
    ],
)
@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
def test_after_a_verdict_everything_is_drawn_anew_from_its_root_on(verification, suffix, num_tokens, guesses, pending):
    """Results for committed tokens stay; those for draws after them do not (docs/exactness.md, 4)."""
    known = drawing(3, verification)
    rebased = known.rebase_to_grow(draft((5, 6), suffix), CHAIN)
    assert (rebased.num_tokens, list(rebased.guesses), rebased.pending) == (num_tokens, guesses, pending)
    assert [*known.log.tokens, *pending] == [5, 6, *suffix]
    assert (len(known.tree), known.tree.root, known.builder.has_root) == (0, None, False)
    assert (len(known.builder), known.builder.children(0)) == (1, [])
    assert known.builder.num_reported == 0


def test_the_same_text_once_more_is_drawn_once_more():
    """The last token is computed again: its draw is part of a block that may have been seen."""
    known = drawing(2)
    rebased = known.rebase_to_grow(draft((5,), (6,)), CHAIN)
    assert (rebased.num_tokens, list(rebased.guesses), rebased.pending) == (1, [], [6])
    assert (len(known.tree), known.tree.root, list(known.log.tokens)) == (0, None, [5])
