"""Candidates are in the order in which each mode would draw them, and the draw is the reference's."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import noise
from core.exact import sampling
from core.noise import Purpose
from core.records import Sampling, Verification
from core.speculation.candidates import MAX_RANKS
from core.speculation.token_tree import NO_Q, NO_TOKEN
from tests.workers.sampling.test_sampler import PROMPT, VOCAB_SIZE, allowed_by, random_logits, rows
from tests.workers.step.readbacks import at_once
from workers.sampling import draft_candidates
from workers.sampling import sampler as twin
from workers.sampling.draft_candidates import DraftRow, Kind, propose
from workers.sampling.draft_vocabulary import DraftVocabulary
from workers.sampling.logits import Row

TOP_TOKENS = 6


def place(row, verification=Verification.COUPLED, sample=None):
    return DraftRow(row, Kind.of(row.sampling, verification), sample)


@st.composite
def places(draw):
    row = draw(rows())
    verification = draw(st.sampled_from(Verification))
    kind = Kind.of(row.sampling, verification)
    return DraftRow(row, kind, draw(st.sampled_from([None, 0, 3])) if kind is Kind.DRAWN else None)


def share(scores):
    """The softmax of all that is possible."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def reference(raw, place):
    """Scores that order the candidates, the laws of confidence and of entropy, and the draw."""
    row, allowed = place.row, allowed_by(place.row)
    log_q = sampling.log_probs(raw, row.sampling, row.tokens, row.prompt_len, allowed)
    if place.kind is Kind.GREEDY:
        at_one = replace(row.sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        law = sampling.log_probs(raw, at_one, row.tokens, row.prompt_len, allowed)
        return law, np.exp(law), np.exp(law), NO_TOKEN
    if place.kind is Kind.COUPLED:
        gumbel = noise.gumbel(row.sampling.seed, row.position, 0, Purpose.SHARED, len(raw))
        scores = log_q.astype(np.float32) + gumbel
        return scores, share(scores), np.exp(log_q), NO_TOKEN
    q = sampling.truncate(log_q, TOP_TOKENS)
    scores = np.full(len(raw), -np.inf)
    scores[list(q.token_ids)] = np.log(q.probs)
    drawn = NO_TOKEN
    if place.sample is not None:
        drawn = sampling.draw_guess(q, len(raw), row.sampling.seed, row.position, place.sample)
    return scores, np.array(q.probs), np.array(q.probs), drawn


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 2)
@given(batch=st.lists(places(), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_every_row_of_a_mixed_batch_equals_the_reference(batch, seed):
    # No two logits alike: which of several equals is cut away is nobody's business.
    logits = random_logits(len(batch), seed) + torch.rand(len(batch), VOCAB_SIZE) * 1e-2
    for at, raw, got in zip(batch, logits.numpy(), at_once(propose, logits, batch, TOP_TOKENS), strict=True):
        if got is None:  # its masks let through nothing that has a logit
            with pytest.raises(ValueError, match="finite"):
                reference(raw, at)
            continue
        scores, sure, law, drawn = reference(raw, at)
        possible = [token for token in np.argsort(-scores, kind="stable").tolist() if np.isfinite(scores[token])]
        ranked = [float(scores[token]) for token in got.ranked]
        assert ranked == pytest.approx([float(scores[token]) for token in possible[:MAX_RANKS]], abs=1e-3)
        assert len(set(got.ranked)) == len(got.ranked)
        assert got.confidence == pytest.approx(float(sure.max()), rel=1e-3, abs=1e-6)
        shares = [] if at.kind is Kind.DRAWN else -np.sort(-sure)[: len(got.ranked)]
        assert got.shares == pytest.approx(shares, rel=1e-3, abs=1e-6)
        entropy = -sum(p * math.log(p) for p in law.tolist() if p > 0)
        assert got.entropy == pytest.approx(entropy, rel=1e-3, abs=1e-4)
        assert got.sampled == drawn
        assert (got.q == NO_Q) == (at.sample is None)
        assert got.q == NO_Q or drawn in got.q.token_ids


@settings(deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_the_first_candidate_is_what_both_sides_draw_in_coupled_mode(batch, seed):
    """Among equals, too: with logits rounded so that there are many."""
    logits = random_logits(len(batch), seed).round()
    drawn = twin.argmax(twin.perturbed(twin.process(logits, batch), batch)).tolist()
    for found, token in zip(at_once(propose, logits, [place(row) for row in batch], TOP_TOKENS), drawn, strict=True):
        assert found is None or found.ranked[0] == token


@settings(deadline=None)
@given(batch=st.lists(places(), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_scores_of_few_tokens_give_the_candidates_of_all_others_at_no_chance(batch, seed):
    """For rows of all kinds, with and without bias, penalties and grammars."""
    token_ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))[: VOCAB_SIZE // 2]
    tokens, logits = DraftVocabulary(VOCAB_SIZE, token_ids), random_logits(len(batch), seed)[:, : len(token_ids)]
    logits = logits + torch.rand(logits.shape) * 1e-2  # no two alike
    few = at_once(partial(propose, tokens=tokens), logits, batch, TOP_TOKENS)
    for got, want in zip(few, at_once(propose, tokens.spread(logits), batch, TOP_TOKENS), strict=True):
        if want is None or got is None:
            assert got is want
            continue
        assert (got.ranked, got.sampled) == (want.ranked, want.sampled)
        assert got.confidence == pytest.approx(want.confidence, rel=1e-4)
        assert got.entropy == pytest.approx(want.entropy, rel=1e-4, abs=1e-5)


def test_a_token_that_cannot_come_is_no_candidate():
    logits = torch.tensor([[1.0, 3.0, 2.0, -math.inf, 2.5]])
    for sampling_, ranked in [
        (Sampling(temperature=0.0), (1, 4, 2, 0)),
        (Sampling(temperature=0.0, logit_bias=((1, -50.0),)), (4, 2, 0, 1)),
        (Sampling(temperature=0.0, min_tokens=9, suppressed_ids=(1,)), (4, 2, 0)),
        (Sampling(top_k=1), (1,)),
    ]:
        row = Row(sampling_, len(PROMPT), PROMPT, len(PROMPT))
        assert at_once(propose, logits, [place(row)], TOP_TOKENS)[0].ranked == ranked


def test_a_coupled_draft_is_sure_where_the_noise_it_shares_leaves_no_doubt():
    """Not where q is peaked: between two equal logits the noise decides, and the draft knows it."""
    row = Row(Sampling(seed=3), 4, [], 3)
    gumbel = noise.gumbel(3, 4, 0, Purpose.SHARED, 2)
    [found] = at_once(propose, torch.zeros(1, 2), [place(row)], TOP_TOKENS)
    assert found.confidence == pytest.approx(float(share(gumbel).max()), rel=1e-4)
    assert found.entropy == pytest.approx(math.log(2))


def test_a_greedy_draft_is_as_sure_as_its_logits_are():
    row = Row(Sampling(temperature=0.0), 4, [], 3)
    [found] = at_once(propose, torch.tensor([[0.0, 0.0, math.log(2.0)]]), [place(row)], TOP_TOKENS)
    assert found.confidence == pytest.approx(0.5)
    assert found.entropy == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


def test_no_more_candidates_than_anybody_may_ask_for():
    row = Row(Sampling(temperature=0.0), 4, [], 3)
    logits = torch.arange(100.0)[None]
    assert at_once(propose, logits, [place(row)], TOP_TOKENS)[0].ranked == tuple(range(99, 99 - MAX_RANKS, -1))


def test_of_many_that_come_first_alike_the_first_is_the_lowest():
    """There are as many ties as candidates, in any of the groups that are searched."""
    row = Row(Sampling(temperature=0.0), 4, [], 3)
    logits = torch.zeros(1, 4096)
    ties = np.random.default_rng(0).choice(4096, MAX_RANKS, replace=False).tolist()
    logits[0, ties] = 1.0
    [found] = at_once(propose, logits, [place(row)], TOP_TOKENS)
    assert found.ranked[0] == min(ties)
    assert set(found.ranked) == set(ties)


@given(st.sampled_from([15, 16, 97, 640, 775]), st.integers(1, 12), st.integers(0, 2**31))
def test_the_largest_are_found_wherever_in_the_vocabulary_they_are(vocab_size, count, seed):
    """Vocabularies whose size the groups divide and others, whose last ids are in no group."""
    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.permuted(np.tile(np.arange(vocab_size, dtype=np.float32), (3, 1)), axis=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "FEW_SCORES", 0)
        values, ids = twin.largest(scores, count)
    expected = scores.topk(min(count, vocab_size))
    assert torch.equal(ids, expected.indices)
    assert torch.equal(values, expected.values)


def test_a_gpu_gets_rows_of_one_kind_in_batches_that_its_memory_holds(monkeypatch):
    rows = [place(Row(Sampling(seed=i, temperature=0.9 * (i % 3 > 0)), 10, [], 3)) for i in range(30)]
    logits = torch.empty(30, VOCAB_SIZE, device="meta")
    assert [len(batch) for batch in draft_candidates._batches(rows, logits)] == [10, 20]
    monkeypatch.setattr(draft_candidates, "GPU_NUMBERS", 8 * VOCAB_SIZE)
    assert [len(batch) for batch in draft_candidates._batches(rows, logits)] == [8, 2, 8, 8, 4]
