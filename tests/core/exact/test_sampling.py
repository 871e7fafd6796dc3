"""p is what the parameters say, step by step and at the edges; tokens are drawn from it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import noise
from core.exact.sampling import draw_guess, log_probs, sample_coupled, truncate
from core.noise import Purpose
from core.records import Sampling
from core.rules import draw

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0, 0.0], dtype=np.float32)
PROMPT_LEN = 2
logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=6, max_size=6).map(lambda row: np.array(row, np.float32))


def probs(sampling, logits=LOGITS, tokens=(0, 0)):
    return np.exp(log_probs(logits, sampling, list(tokens), PROMPT_LEN))


def softmax(logits):
    weights = np.exp(np.asarray(logits, dtype=np.float64) - np.max(logits))
    return weights / weights.sum()


def support(p):
    return set(np.flatnonzero(p).tolist())


def test_plain_parameters_give_softmax():
    assert probs(Sampling()) == pytest.approx(softmax(LOGITS))
    assert probs(Sampling(temperature=0.5)) == pytest.approx(softmax(2 * LOGITS), rel=1e-5)


def test_greedy_takes_the_lowest_of_the_largest():
    assert probs(Sampling(temperature=0, top_k=1, top_p=0.1, min_p=1)).tolist() == [0, 1, 0, 0, 0, 0]


def test_top_k_keeps_ties_with_the_kth():
    assert support(probs(Sampling(top_k=1))) == {1, 3}
    assert support(probs(Sampling(top_k=3))) == {1, 2, 3}
    assert support(probs(Sampling(top_k=6))) == support(probs(Sampling(top_k=2**31 - 1))) == set(range(6))


def test_top_p_takes_the_lower_id_of_equals_and_stops_as_soon_as_the_mass_is_reached():
    even = np.zeros(4, dtype=np.float32)
    assert support(probs(Sampling(top_p=0.5), even)) == {0, 1}
    assert support(probs(Sampling(top_p=0.51), even)) == {0, 1, 2}
    assert support(probs(Sampling(top_p=1e-9), even)) == {0}
    thirds = np.zeros(3, dtype=np.float32)
    assert support(probs(Sampling(top_p=2 / 3), thirds)) == {0, 1}


def test_top_p_measures_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert support(probs(Sampling(top_p=0.55), logits)) == {0, 1}
    assert support(probs(Sampling(top_p=0.55, top_k=2), logits)) == {0}  # 0.4 / 0.7 > 0.55


def test_min_p_is_relative_to_the_likeliest():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    assert support(probs(Sampling(min_p=0.4), logits)) == {0, 1}
    assert support(probs(Sampling(min_p=1.0), LOGITS)) == {1, 3}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    p = probs(Sampling(repetition_penalty=2.0), tokens=(1, 1, 4))
    assert p == pytest.approx(softmax([1.0, 1.5, 2.0, 3.0, -2.0, 0.0]))


def test_presence_and_frequency_count_the_output_alone():
    p = probs(Sampling(presence_penalty=0.5, frequency_penalty=0.25), tokens=(3, 3, 1, 1, 2))
    assert p == pytest.approx(softmax([1.0, 2.0, 1.25, 3.0, -1.0, 0.0]))


def test_bias_comes_before_penalties_and_unknown_ids_are_nothing():
    p = probs(Sampling(repetition_penalty=2.0, logit_bias=((5, 4.0), (4, -1.0), (99, 5.0), (-1, 5.0))), tokens=(5, 4))
    assert p == pytest.approx(softmax([1.0, 3.0, 2.0, 3.0, -4.0, 2.0]))


def test_ids_are_suppressed_until_enough_has_been_said():
    sampling = Sampling(temperature=0, min_tokens=2, suppressed_ids=(1, 3, 77))
    assert probs(sampling, tokens=(0, 0, 5)).argmax() == 2
    assert probs(sampling, tokens=(0, 0, 5, 5)).argmax() == 1


def test_all_but_the_allowed_ids_are_masked_whatever_their_bias():
    p = probs(Sampling(allowed_token_ids=(0, 2, 99), logit_bias=((1, 100.0),)))
    assert support(p) == {0, 2}
    assert p[[0, 2]] == pytest.approx(softmax(LOGITS[[0, 2]]))
    assert probs(Sampling(temperature=0, allowed_token_ids=(4, 5))).argmax() == 5


def test_a_bad_word_is_masked_where_the_output_ends_in_its_beginning():
    sampling = Sampling(bad_words=((3,), (5, 4, 1), (99,)))
    assert support(probs(sampling)) == {0, 1, 2, 4, 5}
    assert support(probs(sampling, tokens=(0, 0, 5, 4))) == {0, 2, 4, 5}
    assert 1 in support(probs(sampling, tokens=(0, 5, 4)))  # of which 5 is the prompt's


def test_masks_before_a_cut_leave_it_as_many():
    assert support(probs(Sampling(top_k=2, bad_words=((1,), (3,))))) == {0, 2}


def test_the_coldest_temperature_neither_overflows_nor_leaves_ties_uneven():
    p = probs(Sampling(temperature=1e-3), np.array([3e38, 3e38, -3e38, 0.0], dtype=np.float32))
    assert p.tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_without_a_distribution_raise(bad):
    with pytest.raises(ValueError, match="NaN"):
        probs(Sampling(), np.array(bad, dtype=np.float32))


@pytest.mark.parametrize(
    ("logits", "sampling"),
    [
        ([3e38, 0.0], Sampling(repetition_penalty=0.1)),
        ([3e38, 0.0], Sampling(repetition_penalty=0.1, temperature=0)),
        ([-math.inf, 1.0], Sampling(min_tokens=5, suppressed_ids=(1,))),
        ([0.0, 1.0], Sampling(allowed_token_ids=(1,), bad_words=((1,),))),
    ],
)
def test_what_bias_and_penalties_leave_without_a_distribution_raises_too(logits, sampling):
    with pytest.raises(ValueError, match="NaN"):
        probs(sampling, np.array(logits, dtype=np.float32))


def test_masked_logits_are_no_error():
    assert probs(Sampling(), np.array([-math.inf, 0.0], dtype=np.float32)).tolist() == [0, 1]


@settings(deadline=None)
@given(
    logits=logit_rows,
    top_k=st.integers(0, 6),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    temperature=st.floats(1e-3, 5),
)
def test_cuts_only_rescale_what_they_keep(logits, top_k, top_p, min_p, temperature):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p, full = probs(sampling, logits), probs(Sampling(temperature=temperature), logits)
    kept = np.flatnonzero(p)
    assert p.sum() == pytest.approx(1)
    assert full[kept].max() == full.max()  # not argmax: unlike logits may be equally likely
    assert p[kept] == pytest.approx(full[kept] / full[kept].sum(), rel=1e-6)
    assert full[kept].min() >= np.delete(full, kept).max(initial=0)


def test_draw_takes_the_lowest_of_equal_scores(monkeypatch):
    monkeypatch.setattr(noise, "gumbel", lambda *key: np.zeros(3, dtype=np.float32))
    assert draw(np.log([0.2, 0.4, 0.4]), 0, 0, 0, Purpose.BONUS) == 1


def test_greedy_tokens_need_no_noise(monkeypatch):
    monkeypatch.delattr(noise, "gumbel")
    assert (
        sample_coupled(log_probs(LOGITS, Sampling(temperature=0), [0, 0], PROMPT_LEN), Sampling(temperature=0), 2) == 1
    )


def test_truncated_q_is_what_guesses_are_drawn_from():
    log_q = np.log([0.4, 0.05, 0.3, 0.25])
    q = truncate(log_q, 2)
    assert q.token_ids == (0, 2)
    assert q.probs == pytest.approx((4 / 7, 3 / 7))
    draws = [draw_guess(q, 4, seed, 5, 1) for seed in range(2000)]
    assert set(draws) == {0, 2}
    assert np.mean(np.array(draws) == 0) == pytest.approx(4 / 7, abs=0.06)


def test_q_has_no_more_tokens_than_hold_its_mass():
    log_q = np.log([0.004, 0.6, 0.002, 0.394])
    assert truncate(log_q, 4).token_ids == (1, 3, 0), "the one that reaches the mass is kept"
    assert truncate(log_q, 4).probs == pytest.approx((0.6 / 0.998, 0.394 / 0.998, 0.004 / 0.998))
    assert truncate(np.log([0.004, 0.6, 0.396]), 4).token_ids == (1, 2), "0.996 is enough"
    assert truncate(log_q, 1).token_ids == (1,)


def test_truncated_q_lists_no_impossible_token():
    with np.errstate(divide="ignore"):
        q = truncate(np.log([0.0, 1.0, 0.0]), 3)
    assert q.token_ids == (1,)
    assert q.probs == (1.0,)
