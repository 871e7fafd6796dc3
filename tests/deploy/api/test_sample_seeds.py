"""Sample i of n depends on the seed and i alone, by the rule that the proto states."""

from __future__ import annotations

import hashlib

from core.records import GenerationRequest, Sampling
from deploy.api import sample_seed
from deploy.api.samples import samples_of

SEED = 2**64 - 3


def seeds_of(num_samples):
    request = GenerationRequest("r", (1,), Sampling(seed=SEED), 10)
    return [each.sampling.seed for each in samples_of(request, num_samples)]


def test_the_first_of_many_are_those_of_few():
    assert seeds_of(8)[:4] == seeds_of(4)
    assert seeds_of(1) == [SEED]
    assert len(set(seeds_of(128))) == 128


def test_a_seed_derives_as_it_is_documented():
    material = SEED.to_bytes(8, "little") + (5).to_bytes(4, "little")
    expected = int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little") % 2**53
    assert sample_seed(SEED, 5) == seeds_of(8)[5] == expected
    assert sample_seed(7, 3) == 4069306837182019
