"""Recent outputs guess later requests of the same key or tenant, through gRPC and engines, and change no token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from local import DEMO, request, system

from core.config import EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.records import Sampling
from deploy.api.authentication import Authenticator, new_key
from deploy.api.hosted import Served
from deploy.grpc.reading import Reader
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.deploy.grpc import rpc

SUFFIX = SpeculationConfig(policy="static", max_draft_tokens=6, guessers=("suffix",))
CONFIG = ServiceConfig(TargetConfig(EngineConfig(str(DEMO / "target"))), speculation=SUFFIX)
TEXT, NUM_TOKENS = "class Reader:\n    def __init__(self, ", 40


@asynccontextmanager
async def asking(served, keys_file) -> AsyncIterator:
    """Asks a server of this service, with a key: the tokens, the rounds and the accepted guesses."""
    about = Served(served.service._pair.target, None, served.tokenizer, Sampling(temperature=0.0), CONFIG)
    server, port = await rpc.start(served.service, Authenticator(keys_file), Reader(), about)
    job = pb.GenerateRequest(
        text=TEXT,
        sampling=pb.SamplingParams(temperature=0.9, seed=5),
        stopping=pb.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    )

    async def ask(key: str = "") -> tuple[list[int], int, int]:
        metadata = [("authorization", f"Bearer {key}")] if key else []
        reply = await generation_pb2_grpc.GenerationServiceStub(channel).Generate(job, metadata=metadata)
        stats = reply.finish.speculation
        return list(reply.token_ids), stats.target_passes, stats.accepted_tokens

    async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
        yield ask
    await server.stop(None)


async def test_a_key_s_second_request_is_guessed_by_its_first_and_nobody_else_s(tmp_path):
    (mine, *lines), (other, line) = new_key("me"), new_key("other")
    lines += [line]
    tenants = [new_key(name, tenant="we") for name in ("one", "two")]
    lines += [line for _, line in tenants]
    (tmp_path / "keys").write_text("\n".join(lines))
    async with system(draft=None, speculation=SUFFIX) as served, asking(served, tmp_path / "keys") as ask:
        first, again, others = await ask(mine), await ask(mine), await ask(other)
        one, two = [await ask(key) for key, _ in tenants]
    assert first[0] == again[0] == others[0] == one[0] == two[0]
    assert again[1] <= NUM_TOKENS // 5 < first[1]
    assert again[2] > NUM_TOKENS // 2 > first[2]
    assert others == one == first, "what others have been answered is not known to them"
    assert two == again, "callers of one tenant know of each other"


async def test_without_keys_no_request_is_guessed_by_another():
    async with system(draft=None, speculation=SUFFIX) as served, asking(served, None) as ask:
        assert await ask() == await ask()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_tokens_are_those_of_plain_decoding_and_of_a_resumed_output(temperature):
    async with system(speculation=replace(SUFFIX, guessers=("draft", "suffix"))) as served:
        prompt = served.tokenizer.encode(TEXT)
        job = request(prompt, NUM_TOKENS, sampling=Sampling(temperature=temperature, seed=3), isolation="caller:a")
        plain = await served.tokens(replace(job, max_draft_tokens=0))
        for guessers in (("suffix",), ("suffix",), ("draft", "suffix")):
            assert await served.tokens(replace(job, guessers=guessers)) == plain
        resumed = replace(job, guessers=("suffix",), resume_tokens=tuple(plain[:15]))
        assert await served.tokens(resumed) == plain[15:]
        await served.check_nothing_is_held()
