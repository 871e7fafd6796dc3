"""Rejection and block verification: chains whose guesses carry the distribution q they were drawn from.

Knows blocks, p, q and the noise; must not know the source of a guess. Proofs and a worked example: docs/exactness.md.
`workers.sampling.chains` is the batched implementation: it computes the sums over the vocabulary on the device and
decides with the functions below, which take a few numbers for each guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core import noise
from core.noise import Purpose
from core.rules.coupled import GREEDY
from core.rules.rule import Float64, Outcome, Rule, draw
from core.speculation import SparseDistribution, TokenTree

NEGLIGIBLE_MASS = 1e-12
"""A residual with less mass than this is rounding error: p and q are equal."""
_Q_SUM_TOLERANCE = 1e-3


def verify_rejection(block: TokenTree, p: Float64, seed: int, num_committed: int, lenience: float = 1.0) -> Outcome:
    """Accept guess x with probability min(1, p(x) / q(x)) until one fails. Then draw from (p - q)+, or p if none
    failed.

    With a `lenience` below 1 the probability is min(1, p(x) / (lenience q(x))): `core.rules.lenient_rejection`.
    `p` is [K+1, V]; row i is the target's distribution after i guesses and sums to 1. Raises: ValueError unless `block`
    is a chain. Source: Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1; Chen et al. 2023 (arXiv 2302.01318).
    """
    block = valid_prefix(block, p.shape[1])
    p_guess = [float(p[row, token]) for row, token in enumerate(block.tokens)]
    residuals, masses = _residuals(block, p, [1.0] * (len(block) + 1))
    uniforms = accept_uniforms(len(block), seed, num_committed)
    accepted, num_relaxed = count_leniently(p_guess, q_of_guesses(block), masses, uniforms, lenience)
    return Outcome(tuple(range(accepted)), _next_token(residuals, accepted, seed, num_committed), num_relaxed)


def verify_block(block: TokenTree, p: Float64, seed: int, num_committed: int) -> Outcome:
    """Accept the longest prefix that passes a joint test of its guesses. Then draw from (w p - q)+, or p if all passed.

    Arguments and errors as for `verify_rejection`.
    Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 2. The paper's symbols in this code:

        M_b, M_s                 p, q
        X_i                      guess i - 1 (the paper counts from 1)
        p_i                      weights[i] = min(weights[i-1] p(X_i) / q(X_i), 1), weights[0] = 1
        sum_x (p_i M_b - M_s)+   masses[i]
        h_i                      masses[i] / (masses[i] + 1 - weights[i]); weights[gamma] for i = gamma
        eta_i, tau               uniforms[i - 1], accepted
        p_res                    (weights[tau] p - q)+, normalised
    """
    block = valid_prefix(block, p.shape[1])
    p_guess = [float(p[row, token]) for row, token in enumerate(block.tokens)]
    weights = prefix_weights(p_guess, q_of_guesses(block))
    residuals, masses = _residuals(block, p, weights)
    accepted = count_by_block(weights, masses, accept_uniforms(len(block), seed, num_committed))
    return Outcome(tuple(range(accepted)), _next_token(residuals, accepted, seed, num_committed))


def valid_prefix(block: TokenTree, vocab_size: int) -> TokenTree:
    """The guesses before the first one that cannot have been drawn from its q. The rest is ignored.

    A draft that follows the protocol is never cut, so this changes no distribution. Raises: ValueError unless `block`
    is a chain.
    """
    if not block.is_chain:
        raise ValueError("rejection and block verification take chains only")
    length = 0
    for token, q in zip(block.tokens, block.q, strict=False):
        if not can_have_drawn(q, token, vocab_size):
            break
        length += 1
    return block if length == len(block) else TokenTree.chain(block.tokens[:length], block.q[:length])


def can_have_drawn(q: SparseDistribution, token: int, vocab_size: int) -> bool:
    """Whether q is a probability distribution over the vocabulary and gives `token` a positive probability."""
    ids, probs = q.token_ids, q.probs
    return (
        len(ids) == len(probs) == len(set(ids))
        and token in ids
        and min(ids) >= 0
        and max(ids) < vocab_size
        and min(probs) >= 0
        and abs(sum(probs) - 1.0) < _Q_SUM_TOLERANCE  # false for NaN
        and probs[ids.index(token)] > 0
    )


def normalised(q: SparseDistribution) -> list[float]:
    """The probabilities of q in float64, summing to 1. Float32 rounding of their sum does not matter."""
    total = sum(q.probs)
    return [prob / total for prob in q.probs]


def q_of_guesses(block: TokenTree) -> list[float]:
    """q(x) of each guess x of a chain from `valid_prefix`."""
    return [q.probs[q.token_ids.index(token)] / sum(q.probs) for token, q in zip(block.tokens, block.q, strict=True)]


def prefix_weights(p_guess: Sequence[float], q_guess: Sequence[float]) -> list[float]:
    """Running ratio of block verification after 0, 1, ... K guesses, each in [0, 1]."""
    weights = [1.0]
    for p_x, q_x in zip(p_guess, q_guess, strict=True):
        weights.append(min(weights[-1] * p_x / q_x, 1.0))
    return weights


def accept_uniforms(length: int, seed: int, num_committed: int) -> list[float]:
    """The uniform number that decides on each guess, keyed by its position and its index in the block."""
    return [noise.uniform(seed, num_committed + row, row, Purpose.ACCEPT) for row in range(length)]


def count_leniently(
    p_guess: Sequence[float],
    q_guess: Sequence[float],
    masses: Sequence[float],
    uniforms: Sequence[float],
    lenience: float,
) -> tuple[int, int]:
    """Number of accepted guesses under `lenience`, and how many of them rejection with lenience 1 would reject.

    If p = q the residual is empty, so the guess is accepted.
    """
    num_relaxed = 0
    for row, (p_x, q_x, u) in enumerate(zip(p_guess, q_guess, uniforms, strict=True)):
        is_relaxed = u * q_x >= p_x and masses[row] > NEGLIGIBLE_MASS
        if is_relaxed and lenience * u * q_x >= p_x:
            return row, num_relaxed
        num_relaxed += is_relaxed
    return len(p_guess), num_relaxed


def count_by_block(weights: Sequence[float], masses: Sequence[float], uniforms: Sequence[float]) -> int:
    """Number of accepted guesses: the longest prefix that passes, whether or not shorter prefixes pass."""
    gamma = len(uniforms)
    for length in range(gamma, 0, -1):
        h = weights[gamma] if length == gamma else _pass_probability(weights[length], masses[length])
        if uniforms[length - 1] < h:
            return length
    return 0


def _pass_probability(weight: float, mass: float) -> float:
    """h of a proper prefix. It is 0/0 if p = q after a prefix of weight 1; a longer prefix then passes with
    certainty."""
    total = mass + 1.0 - weight
    return mass / total if total > 0 else 1.0


def _residuals(block: TokenTree, p: Float64, weights: Sequence[float]) -> tuple[Float64, list[float]]:
    """Residuals to draw from after exactly i accepted guesses [K+1, V] (the last row is p), and the mass of each
    row."""
    residuals = p[: len(block) + 1].copy()
    for row, q in enumerate(block.q):
        residuals[row] *= weights[row]
        residuals[row, list(q.token_ids)] -= normalised(q)
    np.maximum(residuals, 0.0, out=residuals)
    masses: list[float] = residuals.sum(axis=1).tolist()
    for row, mass in enumerate(masses):
        if mass <= NEGLIGIBLE_MASS:
            residuals[row] = p[row]
    return residuals, masses


def _next_token(residuals: Float64, accepted: int, seed: int, num_committed: int) -> int:
    purpose = Purpose.BONUS if accepted == len(residuals) - 1 else Purpose.RESIDUAL
    with np.errstate(divide="ignore"):
        log_residual = np.log(residuals[accepted])
    return draw(log_residual, seed, num_committed + accepted, accepted, purpose)


def law_of(log_p: Float64) -> Float64:
    """p [N, V] from rows of unnormalised log p."""
    p = np.exp(log_p - log_p.max(axis=1, keepdims=True))
    distribution: Float64 = p / p.sum(axis=1, keepdims=True)
    return distribution


def _decide_rejection(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:  # noqa: ARG001
    return verify_rejection(block, law_of(log_p), seed, num_committed)


def _decide_block(block: TokenTree, log_p: Float64, seed: int, num_committed: int, lenience: float) -> Outcome:  # noqa: ARG001
    return verify_block(block, law_of(log_p), seed, num_committed)


REJECTION = Rule(
    name="rejection", needs_q=True, takes_trees=False, is_lossless=True, decide=_decide_rejection, at_zero=GREEDY
)
BLOCK = Rule(name="block", needs_q=True, takes_trees=False, is_lossless=True, decide=_decide_block, at_zero=GREEDY)
