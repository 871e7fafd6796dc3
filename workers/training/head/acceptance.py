"""The worth of a head on held-out texts, offline: at each depth, the rank of the target's token among its guesses.

A chain's or tree's row of step j has read the target's own tokens if all guesses before were right, so the unrolled
pass over a text gives the ranks of every chain that starts in it. At a temperature, target and head draw with one noise
(coupled): the noise is drawn given that the target drew the text's token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor

from workers.training.head.teaching import Steps, Teacher
from workers.training.packing import PackedTexts

MAX_RANK = 8
"""Ranks from here on count as wrong."""
TREE_NODES = 16


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A head's figures on the texts of one kind and temperature."""

    num_tokens: int
    by_depth: list[float]
    """How often the first guess is right, given that those before it are."""
    chains: list[float]
    """Tokens a round, with the target's own, of chains of 1, 2, ... guesses."""
    tree: float
    """Tokens a round of a static tree of 16 guesses."""


@torch.inference_mode()
def ranks_of(
    steps: Steps,
    one: PackedTexts,
    teacher: Teacher,
    output: Tensor,
    temperature: float,
    depth: int,
    generator: torch.Generator,
) -> Tensor:
    """Rank of the token at p + 2 + j among the guesses of step j; `MAX_RANK` if it is not to be guessed.

    `output`: the target's whole output layer [V, hidden].  # int [S, depth]
    """
    noise = _noise(one, teacher, output, temperature, generator) if temperature else None
    ranks = torch.full((len(one.token_ids), depth), MAX_RANK)
    for step, (states, layer) in enumerate(steps(one, depth)):
        rows = one.ahead(2 + step).nonzero().flatten()
        token_ids = teacher.draft_ids[one.token_ids[rows + 2 + step]]
        rows, token_ids = rows[token_ids >= 0], token_ids[token_ids >= 0]
        scores = (states[rows.to(states.device)].to(layer.dtype) @ layer.T).float().cpu()
        if noise is not None:
            scores = scores / temperature + noise[rows + 2 + step]
        own = scores.gather(1, token_ids[:, None])
        ranks[rows, step] = (scores > own).sum(-1).clamp(max=MAX_RANK)
    return ranks


def _noise(
    one: PackedTexts, teacher: Teacher, output: Tensor, temperature: float, generator: torch.Generator
) -> Tensor:
    """Gumbel noise of each token of the draft's vocabulary, given that the target's draw is the text.  # [S, D]"""
    last = one.states[:, -output.shape[1] :].to(output.device, output.dtype)
    logits = (last @ output.T).float().cpu() / temperature
    logs = torch.roll(
        logits - logits.logsumexp(-1, keepdim=True), 1, 0
    )  # of the token at this row, from the row before
    chosen = (teacher.draft_ids >= 0).nonzero().flatten()
    size = (len(logs), 1)
    highest = -torch.empty(size).exponential_(generator=generator).log()  # score of the drawn token
    waits = torch.empty(len(logs), len(chosen)).exponential_(generator=generator)
    noise = -(waits + (logs[:, chosen] - highest).exp()).log()  # truncated: below the drawn token's score
    own = teacher.draft_ids[one.token_ids]
    rows = (own >= 0).nonzero().flatten()
    noise[rows, own[rows]] = (highest - logs.gather(1, one.token_ids[:, None]))[rows, 0]
    return noise


def measured(found: Iterable[tuple[PackedTexts, Tensor]], depth: int) -> Acceptance:
    """`found`: texts and their ranks."""
    texts = [ranks[first : end - 1] for one, ranks in found for first, end in _answers(one)]
    rows = torch.cat([torch.zeros(0, depth, dtype=torch.long), *texts])
    shares = _shares(rows, depth)
    chains = [_tokens_a_round(texts, {(0,) * n for n in range(1, size + 1)}) for size in range(1, depth + 1)]
    return Acceptance(
        len(rows), [each[0] for each in shares], chains, _tokens_a_round(texts, best_tree(shares, TREE_NODES))
    )


def _answers(one: PackedTexts) -> Iterable[tuple[int, int]]:
    """Rows from which a round may start: those before the guessed tokens, but for the first of each answer."""
    starts = one.ahead(2) & torch.roll(one.guessed, -1)
    edges = torch.diff(starts.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    firsts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return zip(firsts, (end + 1 for end in ends), strict=True)


def _shares(rows: Tensor, depth: int) -> list[list[float]]:
    """Chance of each rank at each depth, given that the tokens before have rank 0."""
    found = []
    for step in range(depth):
        counts = torch.bincount(rows[:, step], minlength=MAX_RANK + 1)
        found.append((counts[:MAX_RANK] / max(1, len(rows))).tolist())
        rows = rows[rows[:, step] == 0]
    return found


def best_tree(shares: Sequence[Sequence[float]], num_nodes: int) -> set[tuple[int, ...]]:
    """The likeliest nodes, as paths of ranks."""
    queue: list[tuple[float, tuple[int, ...]]] = [(-share, (rank,)) for rank, share in enumerate(shares[0])]
    queue.sort()
    tree = set[tuple[int, ...]]()
    while queue and len(tree) < num_nodes:
        chance, path = heappop(queue)
        tree.add(path)
        if len(path) < len(shares):
            for rank, share in enumerate(shares[len(path)]):
                heappush(queue, (chance * share, (*path, rank)))
    return tree


def _tokens_a_round(texts: Sequence[Tensor], tree: set[tuple[int, ...]]) -> float:
    """Rounds replayed along each answer: what a round accepts, and the target's own token."""
    tokens = rounds = 0
    for ranks in texts:
        paths, row = ranks.tolist(), 0
        while row < len(paths):
            right = next((n for n in range(len(paths[row]), 0, -1) if tuple(paths[row][:n]) in tree), 0)
            tokens += min(right + 1, len(paths) - row)
            row += right + 1
            rounds += 1
    return tokens / max(1, rounds)
