"""A draft at another temperature than the target's: as exact as any q, if q is the one that it has drawn from."""

import numpy as np
import pytest

from core.rules.chains import verify_block, verify_rejection
from tests.core.rules.decoding import SIGNIFICANCE, Decoder, NoiseTable, count, dirichlet, p_value

pytestmark = pytest.mark.thorough

NUM_DRAWS = 4_000
P, Q = dirichlet(1), dirichlet(2)


def at(temperature):
    tempered = Q ** (1.0 / temperature)
    return tempered / tempered.sum(axis=1, keepdims=True)


def is_exact(monkeypatch, verify, q, **changes):
    decoder = Decoder(P, q, 2, noise=NoiseTable(NUM_DRAWS), **changes)
    return p_value(count(decoder, 2, monkeypatch, verify), P) > SIGNIFICANCE


@pytest.mark.parametrize("temperature", [0.4, 2.5])
@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_q_is_that_of_the_drafts_temperature_and_not_recomputed_at_the_targets(verify, temperature, monkeypatch):
    assert is_exact(monkeypatch, verify, at(temperature))
    assert not is_exact(monkeypatch, verify, at(temperature), sent_q=Q)


@pytest.mark.parametrize("temperature", [0.4, 2.5])
def test_coupled_output_is_that_of_no_draft(temperature):
    noise = NoiseTable(500)
    plain = Decoder(P, Q, 2, noise=noise, keep=lambda last, token: False)
    tempered = Decoder(P, np.asarray(at(temperature)), 2, noise=noise)
    assert [tempered.decode(seed, 6) for seed in range(500)] == [plain.decode(seed, 6) for seed in range(500)]
