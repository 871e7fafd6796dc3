"""Every number of the worked example in docs/exactness.md is what the code computes."""

import re
from pathlib import Path

import numpy as np
import pytest

from core import noise
from core.exact.sampling import draw_guess
from core.noise import Purpose
from core.rules import chains as acceptance
from core.rules import draw
from core.rules.coupled import verify_coupled
from core.speculation.token_tree import SparseDistribution, TokenTree

DOCUMENT = Path(__file__).parents[3] / "docs" / "exactness.md"
SEED, NUM_COMMITTED, GAMMA, VOCAB_SIZE = 8, 5, 2, 4
PRINTED = 0.5e-4 + 1e-9
"""Half of the last digit printed."""


@pytest.fixture(scope="module")
def example():
    return DOCUMENT.read_text(encoding="utf-8").split("## 5. ")[1]


@pytest.fixture(scope="module")
def tables(example):
    """{first cell: other cells} of every table row."""
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in example.splitlines() if line[:1] == "|"
    ]
    return {row[0]: row[1:] for row in rows}


def laws(tables, name):
    rows = [value for key, value in tables.items() if re.fullmatch(rf"{name}\[\d\]", key)]
    return np.array(rows, dtype=np.float64)


@pytest.fixture(scope="module")
def p(tables):
    return laws(tables, "p")


@pytest.fixture(scope="module")
def q(tables):
    return laws(tables, "q")


@pytest.fixture(scope="module")
def block(q):
    laws = [SparseDistribution(tuple(range(VOCAB_SIZE)), tuple(row)) for row in q]
    guesses = [draw_guess(law, VOCAB_SIZE, SEED, NUM_COMMITTED + row, row) for row, law in enumerate(laws)]
    return TokenTree.chain(guesses, laws)


def outcome_cells(guesses, outcome):
    path, next_token, *_ = outcome
    emitted = [*(guesses[node] for node in path), next_token]
    return [" ".join(map(str, guesses)), str(len(path)), str(next_token), " ".join(map(str, emitted))]


def test_noise_is_as_printed(tables):
    names = [name.split() for name in tables if name.split() and name.split()[0] in Purpose.__members__]
    assert len(names) == 7
    for purpose, position, row in names:
        printed = [float(cell) for cell in tables[f"{purpose} {position} {row}"]]
        computed = noise.gumbel(SEED, int(position), int(row), Purpose[purpose], VOCAB_SIZE)
        assert computed.tolist() == pytest.approx(printed, abs=PRINTED)


def test_coupled_outcome_and_scores(example, tables, p, q):
    shared = [
        noise.gumbel(SEED, NUM_COMMITTED + row, 0, Purpose.SHARED, VOCAB_SIZE).astype(np.float64)
        for row in range(GAMMA + 1)
    ]
    for name, law in (("p", p), ("q", q)):
        for row in range(GAMMA):
            [text] = re.findall(rf"log {name}\[{row}\] \+ G = \(([^)]*)\)", example)
            printed = [float(number) for number in text.replace("*", "").split(",")]
            assert (np.log(law[row]) + shared[row]).tolist() == pytest.approx(printed, abs=0.005 + 1e-9)
    guesses, samples = (
        [draw(np.log(row), SEED, NUM_COMMITTED + i, 0, Purpose.SHARED) for i, row in enumerate(law)] for law in (q, p)
    )
    outcome = verify_coupled(TokenTree.chain(guesses), samples)
    assert outcome_cells(guesses, outcome) == tables["coupled"]


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_outcome_with_q(name, tables, block, p):
    verify = {"rejection": acceptance.verify_rejection, "block": acceptance.verify_block}[name]
    outcome = verify(block, p, SEED, NUM_COMMITTED)
    assert outcome_cells(list(block.tokens), outcome) == tables[name]


def test_block_verification_step_by_step(example, tables, block, p, q):
    uniforms = acceptance.accept_uniforms(GAMMA, SEED, NUM_COMMITTED)
    weights = acceptance.prefix_weights(
        [p[i, token] for i, token in enumerate(block.tokens)], acceptance.q_of_guesses(block)
    )
    masses = [np.maximum(weights[i] * p[i] - q[i], 0).sum() for i in range(GAMMA)]
    thresholds = [masses[1] / (masses[1] + 1 - weights[1]), weights[2]]
    expected = [
        [weights[0], masses[0], None, None, None],
        [weights[1], masses[1], thresholds[0], uniforms[0], bool(uniforms[0] < thresholds[0])],
        [weights[2], None, thresholds[1], uniforms[1], bool(uniforms[1] < thresholds[1])],
    ]
    words = {None: "", True: "yes", False: "no"}
    for i, row in enumerate(expected):
        cells = [words[value] if value is None or isinstance(value, bool) else f"{value:.4f}" for value in row]
        assert cells == tables[str(i)]
    assert f"`u` = ({uniforms[0]:.4f}, {uniforms[1]:.4f})" in example
    residual = ", ".join(f"{value:.2f}".replace("0.00", "0") for value in np.maximum(p[0] - q[0], 0))
    assert f"(p − q)₊ = ({residual})" in example
