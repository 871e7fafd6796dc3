"""Chances of agreement against draws with shared noise, and losses against what they stand for."""

from __future__ import annotations

import pytest
import torch

from workers.training.draft.agreement import OBJECTIVES, accepted_by_rule, accepted_mass, coupled_match

NUM_DRAWS = 40_000


@pytest.fixture(scope="module")
def pair():
    """Distributions over a few tokens; the last row's are as unlike as float32 has them."""
    torch.manual_seed(4)
    logits = 2 * torch.randn(2, 5, 12)
    logits[0, -1, 0], logits[1, -1, 1] = 90.0, 90.0
    log_p, log_q = logits.log_softmax(-1)
    return log_p, log_q.requires_grad_()


def by_pairs(log_p, log_q):
    """Σ_j 1 / Σ_i max(p_i / p_j, q_i / q_j), as it stands."""
    ratios = torch.maximum(*((each[..., None, :] - each[..., :, None]) for each in (log_p.double(), log_q.double())))
    return (-ratios.logsumexp(-1)).exp().sum(-1)


def test_the_closed_form_is_how_often_shared_noise_draws_one_token(pair):
    log_p, log_q = (each.detach() for each in pair)
    noise = -torch.empty(NUM_DRAWS, *log_p.shape).exponential_().log()
    agreed = ((log_p + noise).argmax(-1) == (log_q + noise).argmax(-1)).float().mean(0)
    torch.testing.assert_close(coupled_match(log_p, log_q), agreed, atol=5 * 0.5 / NUM_DRAWS**0.5, rtol=0)
    torch.testing.assert_close(coupled_match(log_p, log_q), by_pairs(log_p, log_q).float(), atol=1e-5, rtol=1e-4)


def test_the_closed_forms_gradient_is_that_of_all_pairs(pair):
    log_p, log_q = pair[0][:-1], pair[1][:-1]
    found, expected = (torch.autograd.grad(of(log_p, log_q).sum(), pair[1])[0] for of in (coupled_match, by_pairs))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


def test_the_sampled_forms_mean_is_the_closed_form(pair):
    log_p, log_q = (each.detach().expand(NUM_DRAWS, -1, -1) for each in pair)
    torch.manual_seed(0)
    chances = (-OBJECTIVES["coupled_sampled"](log_p, log_q)).exp().mean(0)
    torch.testing.assert_close(chances, coupled_match(*pair).detach(), atol=5 * 0.5 / NUM_DRAWS**0.5, rtol=0)


def test_coupled_draws_agree_at_least_as_often_as_is_proven(pair):
    """(1 - TV) / (1 + TV) at least, and never more often than rejection accepts. Source: arXiv 2408.07978."""
    log_p, log_q = (each.detach() for each in pair)
    overlap, coupled = accepted_mass(log_p, log_q), coupled_match(log_p, log_q)
    assert bool((coupled >= overlap / (2 - overlap) - 1e-6).all())
    assert bool((coupled <= overlap + 1e-6).all())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_draft_that_equals_its_target_has_no_loss_and_another_has(pair, name):
    log_p, log_q = pair
    torch.testing.assert_close(OBJECTIVES[name](log_p, log_p), torch.zeros(5), atol=1e-5, rtol=0)
    loss = OBJECTIVES[name](log_p, log_q).sum()
    assert float(loss.detach()) > 1
    (slope,) = torch.autograd.grad(loss, log_q)
    assert bool(slope.isfinite().all())
    assert float(slope[:-1].abs().sum()) > 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_following_the_gradient_brings_the_draft_to_its_target(pair, name):
    log_p = pair[0][:-1]
    torch.manual_seed(1)
    logits = torch.zeros_like(log_p).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    before = coupled_match(log_p, logits.detach().log_softmax(-1)).mean()
    for _ in range(200):
        optimizer.zero_grad()
        OBJECTIVES[name](log_p, logits.log_softmax(-1)).sum().backward()
        optimizer.step()
    after = coupled_match(log_p, logits.detach().log_softmax(-1)).mean()
    assert float(before) < 0.6 < 0.85 < float(after)


def test_greedy_outputs_agree_where_the_likeliest_tokens_do():
    log_p = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    log_q = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log()
    assert accepted_by_rule(log_p, log_q, 0.0)["greedy"].tolist() == [1.0, 0.0]
