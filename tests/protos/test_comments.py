"""Ranges in the proto's comments are the ones that are enforced."""

from __future__ import annotations

import re

import pytest

from core.config import Limits
from core.ranges import ranges_of
from core.records import BIAS, GenerationRequest, Sampling
from protos.generate import ROOT, SOURCES
from protos.outrider.v1 import generation_pb2 as pb

FIELD = re.compile(r"(?:optional |repeated |)(?:map<.*>|\w+) (\w+) = \d+;")
SAMPLING_FIELDS = {**ranges_of(Sampling), "logit_bias": BIAS}
SPECULATION = ranges_of(GenerationRequest)


def comments(message):
    """The comment above each field of this message."""
    text = (ROOT / SOURCES[0]).read_text()
    body = text.split(f"message {message} {{\n")[1].split("\n}")[0]
    found, above = {}, []
    for line in map(str.strip, body.splitlines()):
        if line.startswith("//"):
            above.append(line.removeprefix("//").strip())
        elif match := FIELD.match(line):
            found[match.group(1)] = " ".join(above)
            above = []
    return found


MASKS = {"allowed_token_ids", "bad_words", "bad_word_ids"}
"""Lists, which have bounds of another kind."""


@pytest.mark.parametrize("name", sorted(set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - MASKS))
def test_each_sampling_field_says_its_range(name):
    assert str(SAMPLING_FIELDS[name]) in comments("SamplingParams")[name]


def test_other_numbers_say_theirs():
    from deploy.api.request import MAX_TIMEOUT_S

    limits = Limits()
    assert f"At most {limits.max_allowed_token_ids}" in comments("SamplingParams")["allowed_token_ids"]
    bounds = f"at most {limits.max_bad_words}, each of at most {limits.max_bad_word_tokens} tokens"
    assert bounds in comments("SamplingParams")["bad_words"]
    for name in SPECULATION.keys() & comments("SpeculationParams").keys():
        assert str(SPECULATION[name]) in comments("SpeculationParams")[name], name
    assert f"(0, {MAX_TIMEOUT_S:.0f}]" in comments("GenerateRequest")["timeout_s"]
