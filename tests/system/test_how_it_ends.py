"""Clients learn how an output ended, as the proto's comments say: ids, text, usage, and what matched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from local import request, system

from core.records import Sampling, Verification
from deploy.api import SamplesUsage
from deploy.grpc.responses import to_response
from protos.outrider.v1 import generation_pb2 as pb

PROMPT = "def parse_args(self, args):\n    "
NUM_TOKENS = 24
REPEATS = (Verification.COUPLED, Verification.REJECTION, Verification.RECURSIVE_REJECTION)
"""The rules of `make test`: the one whose outputs come again, and two that draw, of a chain and of a tree."""
END = 0
"""The end-of-sequence token of the demo pair; a special token, so that it has no text."""
AT_THE_END = Sampling(temperature=0.0, logit_bias=((END, 100.0),), min_tokens=3, suppressed_ids=(END,))
"""Says END as soon as it may, which is after three tokens."""


async def answer(served, job):
    """The client's response, which must be the same without drafting."""
    responses = []
    for one in (job, replace(job, max_draft_tokens=0)):
        responses.append(response_of(await served.complete(one), one))
        responses[-1].finish.ClearField("speculation")
    assert responses[0] == responses[1]
    return responses[0]


def response_of(chunks, job):
    """The servicer's response of these chunks."""
    usage = SamplesUsage([job])
    for chunk in chunks:
        usage.observe(0, chunk)
    return to_response([chunks], [job], usage.total)


def check(response, token_ids, text, reason=pb.FINISH_REASON_STOP, matched=None):
    assert list(response.token_ids) == token_ids
    assert len(response.logprobs) == response.usage.completion_tokens == len(token_ids)
    assert (response.text, response.finish.reason) == (text, reason)
    which = response.finish.WhichOneof("matched")
    assert (getattr(response.finish, which) if which else None) == matched


@pytest.mark.parametrize("include_stop", [False, True])
async def test_what_ends_an_output_is_the_last_of_its_ids_and_counted(include_stop):
    async with system() as served:
        prompt, decode = served.tokenizer.encode(PROMPT), served.tokenizer.decode
        job = request(prompt, NUM_TOKENS, num_logprobs=0, include_stop=include_stop)
        plain = await served.tokens(job)

        limited = await answer(served, replace(job, max_tokens=8))
        check(limited, plain[:8], decode(plain[:8]), pb.FINISH_REASON_LENGTH)

        for max_tokens in (NUM_TOKENS, 6):  # also where it is the last that the limit allows
            stopping = replace(job, max_tokens=max_tokens, stop_token_ids=frozenset({plain[5]}))
            shown = decode(plain[: 6 if include_stop else 5])
            check(await answer(served, stopping), plain[:6], shown, matched=plain[5])

        whole = decode(plain[:8])
        assert decode(plain[:2]) == "if args"
        for stop, num_tokens in ((whole[-3:], 8), (whole[-6:-3], 7), ("rg", 2)):  # a token's own; its end; its middle
            before = whole[: whole.index(stop)]
            for max_tokens in (NUM_TOKENS, num_tokens):
                stopping = replace(job, max_tokens=max_tokens, stop=(stop,))
                shown = before + stop if include_stop else before
                check(await answer(served, stopping), plain[:num_tokens], shown, matched=stop)
        await served.check_nothing_is_held()


@pytest.mark.parametrize("include_stop", [False, True])
async def test_an_end_of_sequence_token_is_among_the_ids_without_text_and_names_nothing(include_stop):
    async with system() as served:
        assert served.leases.engines["target"].info.eos_token_ids == (END,)
        prompt, decode = served.tokenizer.encode(PROMPT), served.tokenizer.decode
        plain = await served.tokens(request(prompt, 3))
        job = request(
            prompt, NUM_TOKENS, num_logprobs=0, include_stop=include_stop, ignore_eos=False, sampling=AT_THE_END
        )
        check(await answer(served, job), [*plain, END], decode(plain))
        check(await answer(served, replace(job, max_tokens=4)), [*plain, END], decode(plain))

        named = replace(job, stop_token_ids=frozenset({END}))
        check(await answer(served, named), [*plain, END], decode(plain), matched=END)

        ordinary = replace(job, ignore_eos=True, max_tokens=5)
        check(await answer(served, ordinary), [*plain, END, END], decode(plain), pb.FINISH_REASON_LENGTH)
        await served.check_nothing_is_held()


@pytest.mark.parametrize(
    "verification",
    [each if each in REPEATS else pytest.param(each, marks=pytest.mark.ci) for each in Verification],
)
async def test_the_seed_that_is_reported_repeats_what_the_comment_says_it_does(verification):
    """With drafting on, all rules but coupled draw another output where the guesses are others."""
    async with system() as served:
        job = request(
            served.tokenizer.encode(PROMPT),
            20,
            verification=verification,
            lenience=0.1 if verification.rule.takes_lenience else 1.0,
            sampling=Sampling(seed=9),
            max_draft_tokens=0,
        )
        response = response_of(await served.complete(job), job)
        again = replace(job, sampling=Sampling(seed=response.finish.seed))
        assert await served.tokens(again) == list(response.token_ids)
        drafted = []
        for gamma in (1, 2, 4):
            drafting = replace(again, max_draft_tokens=gamma)
            drafted.append(response_of(await served.complete(drafting), drafting))
        # Where no draft comes in time, as may be on a busy machine, there is nothing that draws otherwise.
        is_plain = verification is Verification.COUPLED or not any(
            each.finish.speculation.drafted_tokens for each in drafted
        )
        assert all(list(each.token_ids) == list(response.token_ids) for each in drafted) == is_plain
