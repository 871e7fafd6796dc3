"""Batched rejection and block verification of chains; decides as `core.rules.chains`.

Tensors as wide as the vocabulary stay on the device. A few numbers for each guess are read back at once, and the
reference's own functions decide by them on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from core import noise
from core.noise import Purpose
from core.rules import NEGLIGIBLE_MASS, Outcome
from core.rules import chains as reference
from core.speculation import TokenTree
from workers.noise import gumbel_rows
from workers.sampling.batched import Outcomes, of_nodes, starts_of
from workers.sampling.logits import Row
from workers.step import Readback, upload


def verify(
    blocks: Sequence[TokenTree],
    log_p: Tensor,
    rows: Sequence[Row],
    readback: Readback,
    *,
    is_block: bool = False,
    is_lenient: bool = False,
) -> Outcomes:
    """Rejection verification, block verification, or rejection with the rows' lenience.

    Raises: ValueError for a block that is not a chain.
    """
    starts = starts_of(blocks)
    chains = [reference.sound_prefix(block, log_p.shape[1]) for block in blocks]
    kept = [start + depth for chain, start in zip(chains, starts, strict=True) for depth in range(len(chain) + 1)]
    p = log_p[upload(kept, log_p.device)].double().softmax(dim=-1)
    roots = [rows[start] for start in starts]
    q_guess = [reference.q_of_guesses(chain) for chain in chains]
    tokens = [token for chain in chains for token in (*chain.tokens, 0)]  # the last row has no guess after it
    p_guess = p.gather(1, upload(tokens, p.device)[:, None]).flatten()
    weights = _prefix_weights(p_guess, q_guess) if is_block else None
    masses, candidates = _residual_draws(chains, p, weights, roots)
    asked = [readback.ask(tensor) for tensor in (p_guess, masses, candidates)]
    asked_weights = readback.ask(weights) if weights is not None else None

    def outcomes() -> list[Outcome]:
        by_chain = zip(*(of_nodes(values(), chains) for values in asked), strict=True)
        of_prefixes = of_nodes(asked_weights(), chains) if asked_weights else None
        found = []
        for i, (p_x, mass, candidate) in enumerate(by_chain):
            uniforms = reference.accept_uniforms(len(chains[i]), roots[i].sampling.seed, roots[i].position)
            if of_prefixes is not None:
                accepted, num_relaxed = reference.count_by_block(of_prefixes[i], mass, uniforms), 0
            else:
                lenience = roots[i].lenience if is_lenient else 1.0
                accepted, num_relaxed = reference.count_leniently(p_x[:-1], q_guess[i], mass, uniforms, lenience)
            found.append(Outcome(tuple(range(accepted)), int(candidate[accepted]), num_relaxed))
        return found

    return outcomes


def _prefix_weights(p_guess: Tensor, q_guess: Sequence[Sequence[float]]) -> Tensor:
    """`reference.prefix_weights` of all chains, concatenated, with the same operations in the same order.  # [R]

    `p_guess` [R] has one more value for each chain, after those of its guesses.
    """
    lengths = [len(q) for q in q_guess]
    longest = max(lengths)
    starts = list(accumulate((1 + length for length in lengths), initial=0))
    padded = [[starts[chain] + min(depth, length) for depth in range(longest)] for chain, length in enumerate(lengths)]
    p = p_guess[upload(padded, p_guess.device, torch.int64).view(len(lengths), longest)]
    q = upload([[*q, *[1.0] * (longest - len(q))] for q in q_guess], p.device, p.dtype).view(p.shape)
    weights = [p.new_ones(len(lengths))]
    for depth in range(longest):
        weights.append((weights[-1] * p[:, depth] / q[:, depth]).clamp(max=1.0))
    flat = [chain * (1 + longest) + depth for chain, length in enumerate(lengths) for depth in range(1 + length)]
    return torch.stack(weights, dim=1).flatten()[upload(flat, p.device)]


def _residual_draws(
    chains: Sequence[TokenTree], p: Tensor, weights: Tensor | None, roots: Sequence[Row]
) -> tuple[Tensor, Tensor]:
    """For each chain and each number of accepted guesses: mass of the residual, and the token drawn from it. # [R], [R]

    `weights` [R] are those of the prefixes, 1 if None. The token after a fully accepted chain is drawn from p.
    """
    if weights is None:
        residual = p.clone()
    else:
        is_last = [depth == len(chain) for chain in chains for depth in range(len(chain) + 1)]
        residual = p * weights.masked_fill(upload(is_last, p.device), 1.0)[:, None]
    index, ids, probs = _q_entries(chains)
    where = (upload(index, p.device, torch.int64), upload(ids, p.device, torch.int64))
    residual.index_put_(where, -upload(probs, p.device, p.dtype), accumulate=True)
    residual.clamp_(min=0.0)
    masses = residual.sum(dim=-1)
    residual = torch.where(masses[:, None] > NEGLIGIBLE_MASS, residual, p)
    gumbel = gumbel_rows(_keys(chains, roots), p.shape[1], p.device)
    return masses, (residual.log().float() + gumbel).argmax(dim=-1)


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
            probs += reference.normalised(q)
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
