"""The output has the target's own law, whatever the draft: the joint law of several tokens across redrafted rounds."""

import numpy as np
import pytest

from tests.core.rules.decoding import SIGNIFICANCE, VERIFY, VOCAB_SIZE, Decoder, NoiseTable, count, dirichlet, p_value

pytestmark = pytest.mark.thorough

NUM_DRAWS = [6_000, pytest.param(100_000, marks=pytest.mark.slow)]
IDS = np.arange(VOCAB_SIZE)


def on(ids, law):
    """`law` with all but `ids` forbidden."""
    masked = np.where(np.isin(IDS, ids), law, 0.0)
    return masked / masked.sum(axis=1, keepdims=True)


def near_zero(law, ids, mass):
    """`law` with `ids` made very unlikely."""
    scaled = np.where(np.isin(IDS, ids), mass * law, law)
    return scaled / scaled.sum(axis=1, keepdims=True)


P = dirichlet(1)
SURE = np.eye(VOCAB_SIZE)[P.argmax(axis=1)]
PAIRS = {
    "unlike": (P, dirichlet(2)),
    "disjoint": (on(IDS[:4], P), on(IDS[4:], dirichlet(3))),
    "equal": (P, P),
    "one-hot": (np.where(IDS[:, None] < 4, P, SURE), np.where(IDS[:, None] < 4, SURE, dirichlet(4))),
    "near zero": (near_zero(P, IDS[:3], 1e-6), near_zero(dirichlet(5), IDS[2:5], 1e-6)),
}
NUM_TOKENS = {"unlike": 3}


@pytest.fixture(scope="module", params=NUM_DRAWS, ids=lambda num_draws: f"{num_draws} draws")
def noise_table(request):
    return NoiseTable(request.param)


@pytest.mark.parametrize(
    "pair", [pair if pair == "unlike" else pytest.param(pair, marks=pytest.mark.thorough) for pair in PAIRS]
)
@pytest.mark.parametrize("verification", [None, *VERIFY], ids=["coupled", "rejection", "block"])
def test_output_follows_the_target(pair, verification, noise_table, monkeypatch):
    p, q = PAIRS[pair]
    decoder = Decoder(p, q, gamma=2, noise=noise_table)
    counts = count(decoder, NUM_TOKENS.get(pair, 2), monkeypatch, VERIFY.get(verification))
    assert p_value(counts, p) > SIGNIFICANCE


@pytest.mark.parametrize(("num_draws", "share"), [(6_000, 0.09), pytest.param(30_000, 0.03, marks=pytest.mark.ci)])
def test_the_check_tells_neighbouring_laws_apart(num_draws, share, monkeypatch):
    decoder = Decoder(P, P, gamma=2, noise=NoiseTable(num_draws))
    counts = count(decoder, 2, monkeypatch)
    assert p_value(counts, (1 - share) * P + share * dirichlet(6)) < SIGNIFICANCE
