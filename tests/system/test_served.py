"""The whole of it over real sockets: exactness, company, bad input, cancellation, deadlines, dead processes."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import starmap

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from local import DEMO
from served import each, tokens
from test_exactness import PROMPTS

from bench.harness.probe import engine_of
from bench.harness.victims import kill_replica, serving, until_replaced
from orchestrator.guessers import BY_TEXT, CONTROLS, HEAD, SOURCES
from protos.outrider.v1 import generation_pb2 as pb
from tests.reference import generate

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SAMPLINGS = [
    pb.SamplingParams(temperature=0.4, top_k=40, top_p=0.95, seed=1),
    pb.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2),
    pb.SamplingParams(temperature=1.2, top_k=100, top_p=0.8, seed=3),
]


@pytest.fixture
async def stub(running):
    async with running.channel() as channel:
        yield running.stub(channel)


ALONE = [(name,) for name in BY_TEXT]
TOGETHER = tuple(source for source in SOURCES if source != HEAD)
"""With a policy that has all of them guess side by side."""


def request(text, max_tokens=32, gamma=None, guessers=(), **fields):
    policy = "adaptive" if guessers == TOGETHER else ""
    speculation = pb.SpeculationParams(max_draft_tokens=gamma, guessers=guessers, policy=policy)
    return pb.GenerateRequest(
        text=text,
        sampling=fields.pop("sampling", pb.SamplingParams(temperature=0.0)),
        stopping=fields.pop("stopping", pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True)),
        speculation=fields.pop("speculation", speculation),
        **fields,
    )


async def assert_nothing_is_held(running):
    """Both engines are empty again, within a round or so of the last stream's end."""
    for role in ("target", "draft"):
        for _ in range(100):
            stats = await running.stats(role)
            if stats.num_sessions == 0:
                break
            await asyncio.sleep(0.05)
        assert (stats.num_sessions, stats.num_jobs) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks


def prompts_of(num_prompts):
    """Different beginnings of code: lines of this project's own, cut at random places."""
    files = sorted((DEMO.parents[1] / "core" / "records").glob("*.py"))
    lines = [line for file in files for line in file.read_text().splitlines() if len(line) > 20]
    chooser = random.Random(0)
    return [chooser.choice(lines)[: chooser.randrange(8, 60)] for _ in range(num_prompts)]


async def check_greedy_equality(stub, num_prompts, num_tokens=48, guessers=()):
    prompts = prompts_of(num_prompts)
    ids = [list((await stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids) for text in prompts]
    served = each(16, [lambda t=text: tokens(stub, request(t, num_tokens, guessers=guessers)) for text in prompts])
    num_compared = 0
    async for output in served:
        assert output == generate(DEMO / "target", ids[num_compared], num_tokens), prompts[num_compared]
        num_compared += 1
    assert num_compared == num_prompts


PLAIN: dict[str, list[int]] = {}
"""Outputs without a draft, by their requests: several tests compare theirs with the same."""


async def plain_outputs(stub, num_tokens, jobs):
    requests = [request(text, num_tokens, 0, sampling=seeded) for text, seeded in jobs]
    for job in requests:
        if str(job) not in PLAIN:
            PLAIN[str(job)] = await tokens(stub, job)
    return [PLAIN[str(job)] for job in requests]


async def check_seeded_equality(stub, samplings, gammas, num_tokens, guessers=(), num_jobs=16):
    """Plain and alone is the reference; with drafting, alone and all at once, nothing may differ."""
    for sampling in samplings:
        jobs = []
        for index in range(num_jobs):
            seeded = pb.SamplingParams()
            seeded.CopyFrom(sampling)
            seeded.seed = sampling.seed * 1000 + index
            jobs.append((PROMPTS[index % len(PROMPTS)], seeded))
        plain = await plain_outputs(stub, num_tokens, jobs)
        assert len({tuple(output) for output in plain}) > num_jobs // 2, "seeds matter"
        for gamma in gammas:
            drafted = [request(text, num_tokens, gamma, guessers, sampling=seeded) for text, seeded in jobs]
            together = [output async for output in each(16, [lambda r=r: tokens(stub, r) for r in drafted])]
            assert together == plain, gamma
            alone = await tokens(stub, drafted[gamma % num_jobs])
            assert alone == plain[gamma % num_jobs], gamma


@pytest.mark.parametrize(("guessers", "num_prompts"), [((), 8), (TOGETHER, 4), *[(each, 4) for each in ALONE]], ids=str)
async def test_greedy_output_is_that_of_transformers(running, stub, guessers, num_prompts):
    await check_greedy_equality(stub, num_prompts, guessers=guessers)
    await assert_nothing_is_held(running)


@pytest.mark.slow
async def test_greedy_output_is_that_of_transformers_for_200_prompts(stub):
    await check_greedy_equality(stub, 200)


@pytest.mark.parametrize(
    ("guessers", "gammas"), [((), (1, 8)), (TOGETHER, (8,)), *[(each, (8,)) for each in ALONE]], ids=str
)
async def test_seeded_output_does_not_depend_on_drafting_or_company(stub, guessers, gammas):
    await check_seeded_equality(stub, SAMPLINGS[1:2], gammas, 24, guessers, num_jobs=8)


async def test_each_source_is_told_of_in_the_statistics_and_no_draft_is_asked_where_it_is_left_out(stub):
    text = "import os\nimport sys\n\n" * 4
    for guessers in ALONE:
        chunks = [chunk async for chunk in stub.GenerateStream(request(text, 48, guessers=guessers))]
        stats = chunks[-1].finish.speculation
        assert [source.name for source in stats.sources] == list(guessers)
        (source,) = stats.sources
        assert source.accepted_tokens == stats.accepted_tokens <= source.drafted_tokens == stats.lookup_tokens
        may_be_wrong = source.name in ("retrieval", *CONTROLS)
        assert (source.drafted_tokens if may_be_wrong else source.accepted_tokens) > 0
        assert (source.failures, stats.draft_time_s) == (0, 0.0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await tokens(stub, request(text, guessers=("draft", "oracle")))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "speculation.guessers[1]: must be one of draft, prompt_lookup" in refused.value.details()


@pytest.mark.slow
async def test_seeded_output_does_not_depend_on_drafting_or_company_in_full(stub):
    await check_seeded_equality(stub, SAMPLINGS, range(1, 9), 64)


async def test_the_last_chunk_says_how_it_went(stub):
    chunks = [chunk async for chunk in stub.GenerateStream(request(PROMPTS[0], 24, logprobs=2))]
    assert [chunk.HasField("finish") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert last.finish.reason == pb.FINISH_REASON_LENGTH
    assert last.usage.completion_tokens == 24 == sum(len(chunk.token_ids) for chunk in chunks)
    stats = last.finish.speculation
    assert stats.target_passes + stats.accepted_tokens == 24
    assert stats.accepted_tokens == sum(sum(chunk.guessed) for chunk in chunks) == sum(stats.accepted_per_position)
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    assert sum(len(chunk.logprobs) for chunk in chunks) == 24
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert (
        "".join(chunk.text for chunk in chunks)
        == (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))).text
    )


async def test_each_request_may_say_how_its_guesses_are_made(stub):
    """All at once, on one service: only who asked for it has tables, and all have the same tokens."""

    async def complete(policy, pipelining):
        speculation = pb.SpeculationParams(policy=policy, pipelining=pipelining)
        chunks = [chunk async for chunk in stub.GenerateStream(request(PROMPTS[0], 48, speculation=speculation))]
        return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].finish.speculation

    plain = [chunk async for chunk in stub.GenerateStream(request(PROMPTS[0], 48, gamma=0))]
    expected = [token for chunk in plain for token in chunk.token_ids]
    policies = ("static", "static_tree", "heuristic", "path_probability")
    ways = [(policy, pipelining) for policy in policies for pipelining in (True, False)]
    for (_, is_pipelined), (ids, stats) in zip(ways, await asyncio.gather(*starmap(complete, ways)), strict=True):
        assert ids == expected
        assert stats.accepted_tokens > 0
        assert (stats.hits + stats.misses > 0) == is_pipelined


async def test_a_seed_that_the_server_drew_repeats_the_output(stub):
    first = await stub.Generate(request(PROMPTS[1], sampling=pb.SamplingParams(temperature=1.0)))
    other = await stub.Generate(request(PROMPTS[1], sampling=pb.SamplingParams(temperature=1.0)))
    again = await stub.Generate(
        request(PROMPTS[1], sampling=pb.SamplingParams(temperature=1.0, seed=first.finish.seed))
    )
    assert again.token_ids == first.token_ids != other.token_ids


async def test_a_stream_resumes_where_it_broke_off(stub):
    job = request(PROMPTS[2], 24, sampling=SAMPLINGS[0])
    whole = await tokens(stub, job)
    job.resume_token_ids.extend(whole[:9])
    assert await tokens(stub, job) == whole[9:]


BAD = {
    "prompt": {"text": ""},
    "text": {"text": "a" * 200_000},
    "sampling.temperature": {"sampling": pb.SamplingParams(temperature=-1)},
    "sampling.top_p": {"sampling": pb.SamplingParams(top_p=float("nan"))},
    "sampling.frequency_penalty": {"sampling": pb.SamplingParams(frequency_penalty=float("inf"))},
    "sampling.logit_bias": {"sampling": pb.SamplingParams(logit_bias={999_999: 1.0})},
    "stopping.max_tokens": {"stopping": pb.StoppingParams(max_tokens=0)},
    "stopping.stop": {"stopping": pb.StoppingParams(stop=["x"] * 1000)},
    "stopping.stop_token_ids": {"stopping": pb.StoppingParams(stop_token_ids=[2**31])},
    "speculation.verification": {"speculation": pb.SpeculationParams(verification=99)},
    "resume_token_ids": {"resume_token_ids": [2**30]},
    "timeout_s": {"timeout_s": -1.0},
    "n": {"n": 10_000},
    "resume_samples": {"n": 2, "resume_samples": [pb.TokenIds(ids=[1])]},
    "resume_samples[0].ids[0]": {"resume_samples": [pb.TokenIds(ids=[2**31])]},
    "prompt_logprobs": {"prompt_logprobs": 21},
    "sampling.allowed_token_ids": {"sampling": pb.SamplingParams(allowed_token_ids=[1, 999_999])},
    "sampling.bad_words": {"sampling": pb.SamplingParams(bad_words=[""])},
    "sampling.bad_word_ids": {"sampling": pb.SamplingParams(bad_word_ids=[pb.TokenIds()])},
    "request_id": {"request_id": "x" * 129},
}


@pytest.mark.parametrize("field", BAD)
async def test_bad_input_names_the_field_in_both_rpcs_and_shows_no_trace(running, stub, field):
    bad = request(BAD[field].get("text", "x = 1"), **{k: v for k, v in BAD[field].items() if k != "text"})
    for call in (stub.Generate(bad), stub.GenerateStream(bad).read()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field.split(".")[-1] in caught.value.details() or field == "prompt"
        assert "Traceback" not in caught.value.details()
        assert len(caught.value.details()) < 500
    assert len(await tokens(stub, request("x = 1", 4))) == 4


async def test_an_oversize_message_is_refused_and_harms_nobody(running):
    async with grpc.aio.insecure_channel(running.address, [("grpc.max_send_message_length", -1)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub(channel).Generate(request("a" * (8 * 1024 * 1024)))
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "Traceback" not in caught.value.details()


async def test_an_expired_call_frees_its_kv(running, stub):
    job = request(PROMPTS[3], 1500)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(job, timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    job.timeout_s = 0.3
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokens(stub, job)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await assert_nothing_is_held(running)


async def check_cancellations(running, stub, num_streams, at_once):
    """Cancelled before the first chunk, between chunks, at the end: nothing stays, and the others get their tokens."""
    chooser = random.Random(1)
    expected = await tokens(stub, request(PROMPTS[0], 32))

    async def cancelled():
        call = stub.GenerateStream(request(chooser.choice(PROMPTS), 256))
        if chooser.random() < 0.5:
            await asyncio.sleep(chooser.random() * 0.3)
        else:
            for _ in range(chooser.randrange(6)):
                await call.read()
        call.cancel()

    jobs = [
        cancelled if index % 10 else (lambda: tokens(stub, request(PROMPTS[0], 32))) for index in range(num_streams)
    ]
    results = [result async for result in each(at_once, jobs)]
    assert all(result == expected for result in results if result is not None)
    assert len([result for result in results if result is not None]) == -(-num_streams // 10)
    await assert_nothing_is_held(running)


async def test_cancelled_streams_leave_nothing_behind(running, stub):
    await check_cancellations(running, stub, 30, at_once=10)


@pytest.mark.slow
async def test_five_hundred_cancelled_streams_leave_nothing_behind(running, stub):
    """With places to spare: one is free a moment after its stream was cancelled."""
    await check_cancellations(running, stub, 500, at_once=16)


async def test_model_info_health_and_reflection(running, stub):
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.target.architecture, info.draft.vocab_size) == ("LlamaForCausalLM", info.target.vocab_size)
    assert info.verification == pb.VERIFICATION_COUPLED
    async with running.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(running.address) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert "outrider.v1.GenerationService" in services


async def test_streams_survive_the_death_of_the_draft_and_of_the_target(running, stub):
    """Last, for it takes engines away: same tokens, no error, and both are replaced."""
    import ray

    jobs = [request(text, 112) for text in PROMPTS[:4]]
    expected = [await tokens(stub, job) for job in jobs]
    for role in ("draft", "target"):
        streams = [asyncio.ensure_future(tokens(stub, job)) for job in jobs]
        await asyncio.sleep(0.4)
        ray.kill(await engine_of(role))
        assert await asyncio.gather(*streams) == expected, role
    stats = (await stub.Generate(jobs[0])).finish.speculation
    assert stats.target_passes > 0


async def read_to_the_end(stream):
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_who_loses_its_orchestrator_is_told_to_resume_and_engines_keep_nothing_of_it(running, stub):
    """After the last. A lease ends with the process that took it, not once its engine has waited for long enough."""
    before = await serving("orchestrator")
    stream = stub.GenerateStream(request(PROMPTS[0], 1024))
    assert await stream.read() is not grpc.aio.EOF
    await kill_replica("orchestrator", random.Random(0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_the_end(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "resume" in caught.value.details()
    await assert_nothing_is_held(running)
    await until_replaced("orchestrator", before, time.monotonic())
