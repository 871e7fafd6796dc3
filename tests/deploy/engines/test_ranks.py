"""A target that spans processes, as Serve runs it: the same tokens, and one life for all its ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from deploy.launch.local import served
from deploy.settings import demo_config
from outrider_client import Client, GenerateFields

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "def fibonacci(n):\n"
FOLLOWER = "ray::FollowerActor"
TIMEOUT_S = 60.0


SETTINGS = ("speculation.policy=static", "speculation.draft_timeout_s=30", "limits.lease_timeout_s=120")
KINDS = ("tensor_parallel", "pipeline_parallel")
TEMPERATURES = (0.0, 0.8)


@pytest.fixture(scope="module")
def alone() -> dict[float, tuple[int, ...]]:
    """The reply of one process."""
    with (
        served(demo_config(SETTINGS), lambda _: None) as endpoints,
        Client(f"localhost:{endpoints.grpc_port}") as client,
    ):
        return {temperature: complete(client, temperature) for temperature in TEMPERATURES}


@pytest.fixture(scope="module", params=KINDS)
def client(alone, request):
    """After the one that served it alone: a process drives one cluster at a time."""
    config = demo_config([*SETTINGS, *(f"{role}.engine.{request.param}=2" for role in ("target", "draft"))])
    with served(config, lambda _: None) as endpoints, Client(f"localhost:{endpoints.grpc_port}") as client:
        yield client


def complete(client: Client, temperature: float, gamma: int | None = None, num_tokens: int = 48) -> tuple[int, ...]:
    return client.generate(PROMPT, **fields(temperature, num_tokens), max_draft_tokens=gamma).token_ids


def fields(temperature: float, num_tokens: int) -> GenerateFields:
    return {"temperature": temperature, "seed": 5, "max_tokens": num_tokens, "ignore_eos": True}


def followers() -> set[int]:
    """Processes of this machine that follow a rank 0."""
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if FOLLOWER in title(path)}


def title(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""


def test_two_ranks_say_what_one_says(client, alone):
    assert len(followers()) == 2
    assert {temperature: complete(client, temperature) for temperature in TEMPERATURES} == alone
    assert {temperature: complete(client, temperature, gamma=0) for temperature in TEMPERATURES} == alone


def test_a_rank_that_dies_takes_its_group_along_and_the_group_is_replaced(client):
    expected = complete(client, 0.8, num_tokens=400)
    before = followers()
    stream = client.stream(PROMPT, **fields(0.8, 400))
    chunk = next(stream)
    tokens = [*chunk.token_ids]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    for chunk in stream:
        tokens += chunk.token_ids
    assert tuple(tokens) == expected
    assert chunk.finish.speculation.target_failures == 1
    end_s = time.monotonic() + TIMEOUT_S
    while len(followers()) != 2 or followers() & before:
        assert time.monotonic() < end_s, "the groups were not replaced"
        time.sleep(0.2)
    assert complete(client, 0.8, num_tokens=400) == expected
