"""All that a step's sampling needs goes to a GPU in one copy, and what comes of it is what comes of it on a CPU."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from core.config import EngineConfig
from core.records import Sampling, Verification
from core.speculation.growth import TreeSpec
from tests.workers.engine.driving import EPOCH, Driver, step, tree_of
from tests.workers.engine.growths import allowed, wide
from tests.workers.step.readbacks import counted
from workers.engine import judging
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.noise import gumbel
from workers.sampling import draft_candidates
from workers.step import transfer

SAMPLINGS = (
    Sampling(0.7, top_k=20, top_p=0.9, seed=2),
    Sampling(1.2, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3, seed=3),
    Sampling(0.9, logit_bias=((7, 2.0),), min_tokens=40, suppressed_ids=(9,), bad_words=((3, 4), (5,)), seed=4),
    Sampling(0.0, allowed_token_ids=(7, 8, 9), presence_penalty=0.5),
    Sampling(0.0),
)
GPU = torch.device("cuda")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Sampling goes a GPU's way, with data on the CPU; lists the copies to the GPU, and the waits for it."""

    @contextmanager
    def way():
        copies = []

        def copied(values, device, dtype=None):
            copies.append(device)
            return transfer._tensor(values, dtype)

        with monkeypatch.context() as patch, counted(monkeypatch) as waits:
            patch.setattr(transfer, "upload", copied)
            for module in (judging, draft_candidates):
                patch.setattr(module, "Uploads", lambda _: transfer.Uploads(GPU))
            patch.setattr(gumbel, "_NOISE", gumbel.NoiseCache(1 << 26))
            yield copies, waits.seen

    return way


def steps_of(engine, requests, way):
    """The replies; in each step at most one copy and one wait."""
    for request in requests:
        engine.add(request)
    replies = {}
    while engine.has_work:
        with way() as seen:
            replies.update(step(engine))
        if seen is not None:
            assert seen == ([GPU], ["readback"])
    return [replies[request.stamp.lease] for request in requests]


def rounds(checkpoint, rule, way):
    """The text of a session of each sampling after a chain and a tree of guesses."""
    config = EngineConfig(checkpoint, kv_cache_tokens=4096)
    target, draft = (
        TargetEngine.load(config, EPOCH, lambda _: None),
        DraftEngine.load(config, EPOCH, 8, lambda _: None),
    )
    verifying, drafting = (
        [Driver(engine, [5 + n, 6, 7, 8], sampling, rule, f"{n}") for n, sampling in enumerate(SAMPLINGS)]
        for engine in (target, draft)
    )
    for verifier in verifying:
        verifier.verify()
    for growth in (replace(each, reports_all=True) for each in (TreeSpec.chain(3), wide(4, 2))):
        for verifier, drafter in zip(verifying, drafting, strict=True):
            drafter.log.extend(verifier.log.tokens[len(drafter.log) :])
        asked = [drafter.draft_request(allowed(growth, drafter.spec)) for drafter in drafting]
        blocks = [tree_of(reply) for reply in steps_of(draft, asked, way)]
        offered = [verifier.verify_request(block) for verifier, block in zip(verifying, blocks, strict=True)]
        for verifier, block, verdict in zip(verifying, blocks, steps_of(target, offered, way), strict=True):
            verifier.log.extend([*(block.tokens[node] for node in verdict.path), verdict.next_token])
            verifier.held = verdict.held
    return [list(verifier.log.tokens) for verifier in verifying]


@pytest.mark.parametrize("rule", Verification)
def test_a_step_sends_once_and_waits_once(rule, checkpoint, as_on_a_gpu):
    assert rounds(checkpoint, rule, as_on_a_gpu) == rounds(checkpoint, rule, nullcontext)
