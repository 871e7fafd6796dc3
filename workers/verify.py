"""Which guesses of a batch of blocks stand, and what token follows each: the twin of `core.acceptance`.

Knows log p on its device, blocks and noise; must not know models or sessions. What is as wide as the vocabulary stays
on the device; a few numbers for each guess come to the host, where the reference's own functions decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from core import acceptance, noise
from core.acceptance import NEGLIGIBLE_MASS, Outcome
from core.noise import Purpose
from core.records import Verification
from core.trees import TokenTree
from workers.sampling import Row, gumbel_rows, sample_coupled


def verify(
    verification: Verification, blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row]
) -> list[Outcome]:
    """The outcome of each block.

    `log_p` [R, V] and `rows` hold, block after block, the root and then each node. Raises: ValueError for a block that
    is not a chain, unless verification is coupled.
    """
    starts = list(accumulate((1 + len(block) for block in blocks), initial=0))[:-1]
    if verification is Verification.COUPLED:
        samples = sample_coupled(log_p, rows).tolist()
        return [
            acceptance.verify_coupled(block, samples[start : start + 1 + len(block)])
            for block, start in zip(blocks, starts, strict=True)
        ]
    chains = [acceptance.sound_prefix(block, log_p.shape[1]) for block in blocks]
    kept = [start + depth for chain, start in zip(chains, starts, strict=True) for depth in range(len(chain) + 1)]
    p = log_p[torch.tensor(kept, device=log_p.device)].double().softmax(dim=-1)
    return _verify_chains(verification, chains, p, [rows[start] for start in starts])


def _verify_chains(
    verification: Verification, chains: Sequence[TokenTree], p: Tensor, roots: Sequence[Row]
) -> list[Outcome]:
    p_guess = _p_of_guesses(chains, p)
    q_guess = [acceptance.q_of_guesses(chain) for chain in chains]
    is_block = verification is Verification.BLOCK
    weights = [
        acceptance.prefix_weights(p_x, q_x) if is_block else [1.0] * (len(p_x) + 1)
        for p_x, q_x in zip(p_guess, q_guess, strict=True)
    ]
    masses, candidates = _residual_draws(chains, p, weights, roots)
    outcomes = []
    for i, (chain, root) in enumerate(zip(chains, roots, strict=True)):
        uniforms = acceptance.accept_uniforms(len(chain), root.sampling.seed, root.position)
        if is_block:
            accepted = acceptance.count_by_block(weights[i], masses[i], uniforms)
        else:
            accepted = acceptance.count_by_rejection(p_guess[i], q_guess[i], masses[i], uniforms)
        outcomes.append((tuple(range(accepted)), int(candidates[i][accepted])))
    return outcomes


def _p_of_guesses(chains: Sequence[TokenTree], p: Tensor) -> list[list[float]]:
    """p(x) of each guess x of each chain."""
    tokens = torch.tensor([token for chain in chains for token in (*chain.tokens, 0)], device=p.device)
    values = _split(p.gather(1, tokens[:, None]).flatten().tolist(), chains)
    return [row[:-1] for row in values]  # nothing is guessed after the last row


def _residual_draws(
    chains: Sequence[TokenTree], p: Tensor, weights: Sequence[Sequence[float]], roots: Sequence[Row]
) -> tuple[list[list[float]], list[list[float]]]:
    """For each chain and each number of accepted guesses: the mass of the residual, and the token drawn from it."""
    weight = torch.tensor([weight for row in weights for weight in (*row[:-1], 1.0)], dtype=p.dtype, device=p.device)
    residual = p * weight[:, None]
    index, ids, probs = _q_entries(chains)
    where = tuple(torch.tensor(part, dtype=torch.int64, device=p.device) for part in (index, ids))
    residual.index_put_(where, -torch.tensor(probs, dtype=p.dtype, device=p.device), accumulate=True)
    residual.clamp_(min=0.0)
    masses = residual.sum(dim=-1)
    residual = torch.where(masses[:, None] > NEGLIGIBLE_MASS, residual, p)
    gumbel = gumbel_rows(_keys(chains, roots), p.shape[1], p.device)
    candidates = (residual.log().float() + gumbel).argmax(dim=-1)
    return _split(masses.tolist(), chains), _split(candidates.tolist(), chains)


def _q_entries(chains: Sequence[TokenTree]) -> tuple[list[int], list[int], list[float]]:
    """The non-zero entries of q as (row of p, token id, probability)."""
    index: list[int] = []
    ids: list[int] = []
    probs: list[float] = []
    row = 0
    for chain in chains:
        for q in chain.q:
            index += [row] * len(q.token_ids)
            ids += q.token_ids
            probs += acceptance.normalised(q)
            row += 1
        row += 1  # the bonus token's
    return index, ids, probs


def _keys(chains: Sequence[TokenTree], roots: Sequence[Row]) -> list[noise.Key]:
    return [
        noise.key(
            root.sampling.seed, root.position + depth, depth, Purpose.BONUS if depth == len(chain) else Purpose.RESIDUAL
        )
        for chain, root in zip(chains, roots, strict=True)
        for depth in range(len(chain) + 1)
    ]


def _split(values: list[float], chains: Sequence[TokenTree]) -> list[list[float]]:
    """One list for each chain, of one more value than it has guesses."""
    iterator = iter(values)
    return [[next(iterator) for _ in range(len(chain) + 1)] for chain in chains]
