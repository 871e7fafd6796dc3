"""Parameters mean what they mean in transformers: every token has the same chance, at all ends of their ranges."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.ranges import ranges_of
from core.records import BIAS, Sampling
from workers.sampling.logits import Row
from workers.sampling.sampler import process

pytestmark = pytest.mark.thorough

VOCAB_SIZE = 500
NUM_ROWS = 8
SUBNORMAL = 5e-324
SAMPLING = ranges_of(Sampling)
ALMOST_ONE = math.nextafter(1.0, 0.0)
TOLERANCE = 5e-6
"""Tolerance of a chance: 1e-6 was seen, which is TOP_P_SLACK. A token of that chance may be kept by one side alone."""
VALUES = {
    "temperature": (SAMPLING["temperature"].low, 1.0, SAMPLING["temperature"].high),
    "top_k": (0, 1, 40, VOCAB_SIZE, SAMPLING["top_k"].high),
    "top_p": (SUBNORMAL, 1e-38, 0.9, ALMOST_ONE, 1.0),
    "min_p": (0.0, SUBNORMAL, 1e-38, 0.1, ALMOST_ONE, 1.0),
    "repetition_penalty": (SAMPLING["repetition_penalty"].low, 1.0, 1.2, SAMPLING["repetition_penalty"].high),
    "logit_bias": [((3, bias), (5, -bias)) for bias in (BIAS.low, SUBNORMAL, BIAS.high)],
}


def theirs(logits, sampling, tokens):
    """The result of transformers in float64, because what its own float32 loses is not asked for."""
    steps = LogitsProcessorList()
    if sampling.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
    steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    steps += [TopPLogitsWarper(sampling.top_p), MinPLogitsWarper(sampling.min_p)]
    return steps(torch.tensor([tokens] * len(logits)), logits.double()).softmax(dim=-1)


def check(sampling, scale):
    logits = scale * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    tokens = list(range(0, VOCAB_SIZE, 3))
    ours = process(logits, [Row(sampling, len(tokens), tokens, 5)] * NUM_ROWS).double().exp()
    expected = theirs(logits, sampling, tokens)
    assert float((ours - expected).abs().max()) < TOLERANCE, sampling


@pytest.mark.parametrize("scale", [3.0, 30.0, 2500.0])
@pytest.mark.parametrize("name", VALUES)
def test_each_parameter_alone_and_at_each_temperature(name, scale):
    """The largest logits are about four times `scale`."""
    for value, temperature in product(VALUES[name], VALUES["temperature"]):
        check(Sampling(**{"temperature": temperature, name: value}), scale)


@pytest.mark.parametrize("scale", [3.0, 30.0])
def test_all_parameters_at_once(scale):
    for top_k, top_p, min_p, penalty in product((0, 40), (SUBNORMAL, 0.9, 1.0), (0.0, 0.1, 1.0), (0.1, 10.0)):
        sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
        check(sampling, scale)
