"""Batched rejection and block verification of chains; decides as `core.rules.chains`.

Tensors as wide as the vocabulary stay on the device. A few numbers for each guess are read back at once; the functions
of the reference decide by them on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from core import noise
from core.noise import Purpose
from core.rules import NEGLIGIBLE_MASS, Outcome
from core.rules import chains as reference
from core.speculation import TokenTree
from workers.noise import prepare_gumbel_rows
from workers.sampling.batched import Decide, Outcomes, of_nodes, starts_of
from workers.sampling.logits import Row
from workers.step import Readback, Uploads


def verify(
    blocks: Sequence[TokenTree],
    rows: Sequence[Row],
    vocab_size: int,
    uploads: Uploads,
    *,
    is_block: bool = False,
    is_lenient: bool = False,
) -> Decide:
    """Rejection verification, block verification, or rejection verification with the rows' lenience.

    Raises: ValueError for a block that is not a chain.
    """
    starts = starts_of(blocks)
    chains = [reference.valid_prefix(block, vocab_size) for block in blocks]
    kept = uploads.add(
        [start + depth for chain, start in zip(chains, starts, strict=True) for depth in range(len(chain) + 1)]
    )
    roots = [rows[start] for start in starts]
    q_guess = [reference.q_of_guesses(chain) for chain in chains]
    tokens = uploads.add([token for chain in chains for token in (*chain.tokens, 0)])  # 0: no guess after the last row
    weigh = _prefix_weights(q_guess, uploads) if is_block else None
    draw = _residual_draws(chains, roots, vocab_size, uploads)

    def decide(log_p: Tensor, readback: Readback) -> Outcomes:
        p = log_p[kept()].double().softmax(dim=-1)
        p_guess = p.gather(1, tokens()[:, None]).flatten()
        weights = weigh(p_guess) if weigh else None
        readers = [readback.add(tensor) for tensor in (p_guess, *draw(p, weights))]
        read_weights = readback.add(weights) if weights is not None else None

        def outcomes() -> list[Outcome]:
            by_chain = zip(*(of_nodes(values(), chains) for values in readers), strict=True)
            of_prefixes = of_nodes(read_weights(), chains) if read_weights else None
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

    return decide


def _prefix_weights(q_guess: Sequence[Sequence[float]], uploads: Uploads) -> Callable[[Tensor], Tensor]:
    """`reference.prefix_weights` of all chains, concatenated, with the same operations in the same order.  # [R]

    The returned function takes p of the guesses [R]; each chain has one more value after those of its guesses.
    """
    lengths = [len(q) for q in q_guess]
    longest = max(lengths)
    starts = list(accumulate((1 + length for length in lengths), initial=0))
    padded = [[starts[chain] + min(depth, length) for depth in range(longest)] for chain, length in enumerate(lengths)]
    flat = [chain * (1 + longest) + depth for chain, length in enumerate(lengths) for depth in range(1 + length)]
    where, order = uploads.add(padded, torch.int64), uploads.add(flat)
    q_there = uploads.add([[*q, *[1.0] * (longest - len(q))] for q in q_guess], torch.float64)

    def weigh(p_guess: Tensor) -> Tensor:
        p = p_guess[where().view(len(lengths), longest)]
        q = q_there().view(p.shape)
        weights = [p.new_ones(len(lengths))]
        for depth in range(longest):
            weights.append((weights[-1] * p[:, depth] / q[:, depth]).clamp(max=1.0))
        return torch.stack(weights, dim=1).flatten()[order()]

    return weigh


def _residual_draws(
    chains: Sequence[TokenTree], roots: Sequence[Row], vocab_size: int, uploads: Uploads
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """For each chain and each number of accepted guesses: mass of the residual, and the token drawn from it. # [R], [R]

    The returned function takes p [R, V] and the weights of the prefixes [R], all 1 if None. The token after a fully
    accepted chain is drawn from p.
    """
    last = [depth == len(chain) for chain in chains for depth in range(len(chain) + 1)]
    is_last = uploads.add(last)
    index, ids, probs = _q_entries(chains)
    rows, columns = uploads.add(index, torch.int64), uploads.add(ids, torch.int64)
    q = uploads.add(probs, torch.float64)
    gumbel = prepare_gumbel_rows(_keys(chains, roots), vocab_size, uploads)

    def draw(p: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = p.clone() if weights is None else p * weights.masked_fill(is_last(), 1.0)[:, None]
        residual.index_put_((rows(), columns()), -q(), accumulate=True)
        residual.clamp_(min=0.0)
        masses = residual.sum(dim=-1)
        residual = torch.where(masses[:, None] > NEGLIGIBLE_MASS, residual, p)
        return masses, (residual.log().float() + gumbel()).argmax(dim=-1)

    return draw


def _q_entries(chains: Sequence[TokenTree]) -> tuple[list[int], list[int], list[float]]:
    """Non-zero entries of q: rows of p, token ids and probabilities."""
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
        row += 1  # the bonus token's row
    return index, ids, probs


def _keys(chains: Sequence[TokenTree], roots: Sequence[Row]) -> list[noise.Key]:
    return [
        noise.key(
            root.sampling.seed, root.position + depth, depth, Purpose.BONUS if depth == len(chain) else Purpose.RESIDUAL
        )
        for chain, root in zip(chains, roots, strict=True)
        for depth in range(len(chain) + 1)
    ]
