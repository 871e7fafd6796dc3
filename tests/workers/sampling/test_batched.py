"""Every rule in the table has a batched twin under its name, which decides as its reference does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.exact.sampling import draw_guess, draw_several, truncate
from core.noise import row_of
from core.records import Sampling
from core.rules import Verification, all_rules
from core.speculation.token_tree import ROOT, TokenTree
from tests.workers.sampling.uploaded import verified
from tests.workers.step.readbacks import at_once
from workers.sampling.logits import Row
from workers.sampling.verify import BATCHED_RULES

VOCAB_SIZE = 12
NUM_CASES = 150


def log_softmax(logits):
    return (
        logits
        - np.log(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True))
        - (logits.max(axis=-1, keepdims=True))
    )


def laws(generator, num_rows):
    logits = generator.normal(scale=1.5, size=(num_rows, VOCAB_SIZE))
    logits[generator.random(logits.shape) < 0.2] = -np.inf
    logits[:, 1] = 1.0
    return log_softmax(logits).astype(np.float32)


def drawn_chain(generator, log_p, seed, position):
    """A chain of an honest draft whose laws are like the target's."""
    q = [truncate(log_softmax(row + generator.normal(scale=0.7, size=VOCAB_SIZE)), 8) for row in log_p[:-1]]
    tokens = [draw_guess(law, VOCAB_SIZE, seed, position + row, row) for row, law in enumerate(q)]
    return TokenTree.chain(tokens, q)


def drawn_tree(generator, log_p, seed, position, rule, unlikeness=0.7, num_tokens=8, most_draws=4):
    """Draws at each place but the last, of which not all may have a node."""
    tokens, parents, laws = [], [], []
    numbers, depths = list(range(len(log_p) - 1)), [0]
    for place, row in enumerate(log_p):
        num_left = len(log_p) - 1 - len(tokens)
        if place > len(tokens) or not num_left:
            break
        q = truncate(log_softmax(row + generator.normal(scale=unlikeness, size=VOCAB_SIZE)), num_tokens)
        noise_row = row_of(depths[place], 9 * numbers[place])
        num_draws = int(generator.integers(1, most_draws + 1))
        draws = draw_several(
            q, VOCAB_SIZE, seed, position + depths[place], noise_row, num_draws, with_replacement=rule.with_replacement
        )
        kept = list(dict.fromkeys(draws))[: min(num_left, int(generator.integers(1, 4)))]
        tokens += kept
        parents += [place - 1] * len(kept)
        depths += [depths[place] + 1] * len(kept)
        laws += [replace(q, draws=draws)] * len(kept)
    return TokenTree(tuple(tokens), tuple(parents), tuple(laws))


def tree(generator, num_nodes):
    """Guesses of likely tokens, a few of them twice, and of ids that are none."""
    parents = tuple(int(generator.integers(ROOT, node)) for node in range(num_nodes))
    tokens = generator.choice([1, 1, 2, 3, 4, -7, 10**9], size=num_nodes)
    return TokenTree(tuple(map(int, tokens)), parents)


def case(generator, rule, is_greedy):
    num_nodes, seed, position = (int(generator.integers(0, top)) for top in (9, 2**63, 99))
    log_p = laws(generator, 1 + num_nodes)
    if not rule.needs_q:
        block = tree(generator, num_nodes)
    elif rule.takes_trees:
        block = drawn_tree(generator, log_p, seed, position, rule)
    else:
        block = drawn_chain(generator, log_p, seed, position)
    sampling = Sampling(seed=seed, temperature=0.0 if is_greedy else 1.0)
    lenience = float(generator.choice([1.0, 0.7, 0.2])) if rule.takes_lenience else 1.0
    return block, log_p, [Row(sampling, position + depth, [], 1, lenience=lenience) for depth in (0, *block.depths)]


def test_the_tables_have_the_same_names():
    assert set(BATCHED_RULES) == {rule.name for rule in all_rules()}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_a_twin_decides_as_its_reference(rule):
    generator = np.random.default_rng(7)
    is_greedy = rule not in [each.rule for each in Verification]
    cases = [case(generator, rule, is_greedy) for _ in range(NUM_CASES)]
    blocks, rows = [block for block, _, _ in cases], [row for _, _, of_block in cases for row in of_block]
    outcomes = at_once(verified, rule.name, blocks, torch.from_numpy(np.concatenate([each[1] for each in cases])), rows)
    expected = [
        rule.decide(block, log_p.astype(np.float64), root.sampling.seed, root.position, root.lenience)
        for block, log_p, (root, *_) in cases
    ]
    assert outcomes == expected
    assert any(outcome.path for outcome in outcomes), "or nothing was ever accepted"
    assert any(outcome.num_relaxed for outcome in outcomes) is not rule.is_lossless


@pytest.mark.parametrize("rule", [rule for rule in all_rules() if rule.needs_q and rule.takes_trees], ids=str)
def test_a_twin_decides_as_its_reference_where_laws_are_nearly_the_same(rule):
    """There it is so unlikely that all of many trials fail that it could be taken for rounding."""
    generator = np.random.default_rng(8)
    laws_of = [laws(generator, 2) for _ in range(200)]
    blocks = [
        drawn_tree(generator, log_p, seed, 5, rule, unlikeness=0.05, num_tokens=VOCAB_SIZE, most_draws=8)
        for seed, log_p in enumerate(laws_of)
    ]
    rows = [
        Row(Sampling(seed=seed, temperature=1.0), 5 + depth, [], 1)
        for seed, block in enumerate(blocks)
        for depth in (0, *block.depths)
    ]
    outcomes = at_once(verified, rule.name, blocks, torch.from_numpy(np.concatenate(laws_of)), rows)
    expected = [
        rule.decide(block, log_p.astype(np.float64), seed, 5, 1.0)
        for seed, (block, log_p) in enumerate(zip(blocks, laws_of, strict=True))
    ]
    assert outcomes == expected
    num_failures = sum(outcome.path != (0,) for outcome in outcomes)
    assert num_failures > 0, "or all is accepted as if it were the same"
