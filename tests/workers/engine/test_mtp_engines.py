"""The MTP layer of the target's checkpoint as its head, at both places: what it guesses is what its formulas say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config import EngineConfig
from tests import mtp
from tests.workers.engine.driving import EPOCH, Driver, chain, wrong
from tests.workers.engine.test_eagle_engines import agree, drafted, judged, likeliest_of
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31, 8]


@pytest.fixture(params=mtp.NUM_LAYERS)
def written(request, tmp_path):
    return tmp_path, mtp.write(request.param, tmp_path)


@torch.inference_mode()
def guessed_by_hand(path, reference, text, depth):
    """The chain of likeliest tokens below the text."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    states = target.model(torch.tensor([text[:-1]])).last_hidden_state[0].bfloat16().float()
    tokens = []
    for _ in range(depth):
        tokens.append(int(reference.guessed(text, states, tokens)[-1].argmax()))
    return tokens


def test_both_places_guess_what_the_formulas_say(written):
    path, reference = written
    settings = EngineConfig(str(path), head=str(path), block_tokens=4, kv_cache_tokens=1024)
    target = TargetEngine.load(replace(settings, feature_layers=(-1,), head_passes=4), EPOCH, lambda _: None)
    draft = DraftEngine.load(settings, EPOCH, 64, lambda _: None)
    plain = Driver(target, PROMPT, session="plain").run(5)
    verifying, drafting = Driver(target, PROMPT), Driver(draft, PROMPT)
    drafting.verified = verifying.log.tokens
    for block in (None, chain(plain[1], plain[2], wrong(plain[3])), None, chain(wrong(plain[4]))):
        verdict = judged(target, verifying, block)
        text = list(verifying.log.tokens)
        by_hand = guessed_by_hand(path, reference, text, 4)
        agree(verdict.guesses, by_hand, least=1)
        assert likeliest_of(drafted(draft, drafting, verdict)) == by_hand
