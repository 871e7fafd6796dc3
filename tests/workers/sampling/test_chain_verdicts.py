"""The torch twin reaches the reference's verdict on thousands of random blocks, corrupt ones included."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.exact.sampling import draw_guess, sample_coupled, truncate
from core.records import Sampling, Verification
from core.rules import chains as acceptance
from core.rules.coupled import verify_coupled
from core.speculation.token_tree import ROOT, SparseDistribution, TokenTree
from tests.workers.sampling.uploaded import verified
from tests.workers.step.readbacks import at_once
from workers.sampling.logits import Row

pytestmark = pytest.mark.thorough

VOCAB_SIZE = 12
REFERENCE = {Verification.REJECTION: acceptance.verify_rejection, Verification.BLOCK: acceptance.verify_block}
KINDS = ("unlike", "near", "equal", "disjoint", "one-hot", "corrupt", "no q")


def random_law(generator, kind, p):
    """log q for a draft that stands to log p as `kind` says."""
    if kind == "equal":
        return p
    if kind == "near":
        return p + generator.normal(scale=0.3, size=VOCAB_SIZE)
    law = generator.normal(scale=2, size=VOCAB_SIZE)
    if kind == "disjoint":
        law[np.isfinite(p)] = -np.inf
        law[0] = 0.0
    return law


def log_softmax(logits):
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def random_case(generator, kind):
    """A block as a draft of this kind makes it, log p of its rows, and the rows."""
    length, seed, position = (
        int(generator.integers(0, 5)),
        int(generator.integers(0, 2**63)),
        int(generator.integers(1, 99)),
    )
    logits = generator.normal(scale=2, size=(length + 1, VOCAB_SIZE))
    logits[generator.random(logits.shape) < 0.3] = -np.inf
    logits[:, 1] = 1.0
    log_p = np.stack([log_softmax(row) for row in logits]).astype(np.float32)
    q = [truncate(log_softmax(random_law(generator, kind, row)), 1 if kind == "one-hot" else 8) for row in logits[:-1]]
    tokens = [draw_guess(law, VOCAB_SIZE, seed, position + row, row) for row, law in enumerate(q)]
    if kind == "corrupt" and tokens:
        tokens[int(generator.integers(length))] = int(generator.choice([-3, VOCAB_SIZE, 10**9]))
    block = TokenTree.chain(tokens, () if kind == "no q" else q)
    rows = [Row(Sampling(seed=seed), position + row, [], 1) for row in range(length + 1)]
    return block, log_p, rows


def batch_of(cases):
    blocks = [block for block, _, _ in cases]
    log_p = torch.from_numpy(np.concatenate([log_p for _, log_p, _ in cases]))
    return blocks, log_p, [row for _, _, rows in cases for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verification", REFERENCE)
def test_verdicts_equal_the_reference(verification, kind):
    generator = np.random.default_rng(KINDS.index(kind))
    cases = [random_case(generator, kind) for _ in range(200)]
    outcomes = at_once(verified, verification, *batch_of(cases))
    for (block, log_p, rows), outcome in zip(cases, outcomes, strict=True):
        p = torch.from_numpy(log_p).double().softmax(dim=-1).numpy()
        assert outcome == REFERENCE[verification](block, p, rows[0].sampling.seed, rows[0].position)


@settings(deadline=None, max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 10**6), kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
@pytest.mark.parametrize("verification", REFERENCE)
def test_a_verdict_does_not_depend_on_its_batch(verification, seed, kinds):
    generator = np.random.default_rng(seed)
    cases = [random_case(generator, kind) for kind in kinds]
    together = at_once(verified, verification, *batch_of(cases))
    assert together == [at_once(verified, verification, *batch_of([case]))[0] for case in cases]


def test_coupled_trees_follow_the_targets_samples():
    generator = np.random.default_rng(0)
    trees = [TokenTree((5, 7, 5, 8), (ROOT, ROOT, 1, 1)), TokenTree(), TokenTree.chain([-4, 10**9])]
    rows, cases = [], []
    for index, tree in enumerate(trees):
        rows += [
            Row(Sampling(seed=index, temperature=float(index != 2)), 4 + depth, [], 1) for depth in (0, *tree.depths)
        ]
    log_p = torch.from_numpy(generator.normal(size=(len(rows), VOCAB_SIZE)).astype(np.float32)).log_softmax(dim=-1)
    samples = [
        sample_coupled(row_log_p.astype(np.float64), row.sampling, row.position)
        for row_log_p, row in zip(log_p.numpy(), rows, strict=True)
    ]
    start = 0
    for tree in trees:
        cases.append(verify_coupled(tree, samples[start : start + 1 + len(tree)]))
        start += 1 + len(tree)
    assert at_once(verified, Verification.COUPLED, trees, log_p, rows) == cases


@pytest.mark.parametrize("verification", REFERENCE)
def test_trees_are_refused(verification):
    q = SparseDistribution((1,), (1.0,))
    tree = TokenTree((1, 1), (ROOT, ROOT), (q, q))
    rows = [Row(Sampling(), 3, [], 1)] * 3
    with pytest.raises(ValueError, match="chains only"):
        at_once(verified, verification, [tree], torch.zeros(3, VOCAB_SIZE).log_softmax(dim=-1), rows)
