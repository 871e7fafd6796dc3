"""The host reads the device's values, and waits for them once a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.config import EngineConfig
from core.records import Sampling, Verification
from core.speculation.growth import TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK, ROOT, TokenTree
from tests import checkpoints
from tests.workers.engine.driving import EPOCH, Driver
from tests.workers.step.readbacks import counted
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.model.loader import load
from workers.runtime.runtime import ModelRuntime
from workers.step import transfer
from workers.step.transfer import Readback, upload

DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.uint8)
SAMPLINGS = (
    (Sampling(temperature=0.0), Verification.COUPLED),
    (Sampling(seed=1), Verification.COUPLED),
    (Sampling(seed=2, top_k=5, top_p=0.9, min_p=0.01), Verification.REJECTION),
    (Sampling(seed=3, presence_penalty=0.5, repetition_penalty=1.1, logit_bias=((3, 1.0),)), Verification.BLOCK),
    (Sampling(seed=4, frequency_penalty=0.1, min_tokens=90, suppressed_ids=(1, 2)), Verification.BLOCK),
)


@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=8
    )
)
def test_everything_arrives_as_it_was(tensors: list[tuple[torch.dtype, list[int], bool]]) -> None:
    """Empty tensors, numbers and what is not contiguous included."""
    made = []
    for number, (dtype, shape, is_strided) in enumerate(tensors):
        tensor = (torch.arange(math.prod(shape)) + number).reshape(shape).to(dtype)
        made.append(tensor.movedim(0, -1)[..., ::2] if is_strided and shape else tensor)
    readback = Readback()
    readers = [readback.add(tensor) for tensor in made]
    readback.wait()
    assert [values() for values in readers] == [tensor.tolist() for tensor in made]
    if made:  # as from a GPU
        assert [tensor.tolist() for tensor in transfer._on_host(made)] == [tensor.tolist() for tensor in made]


def test_nothing_is_there_before_it_has_been_waited_for() -> None:
    readback = Readback()
    readback.add(torch.zeros(1))
    readback.wait()
    values = readback.add(torch.zeros(3))
    with pytest.raises(IndexError):
        values()
    readback.wait()
    assert values() == [0.0] * 3


SCORES = st.sampled_from([-1.5, 0.0, 0.25, 3.0, math.inf, -math.inf, math.nan])


@given(rows=st.lists(st.lists(SCORES, min_size=5, max_size=5), min_size=1, max_size=4))
def test_the_largest_score_of_each_row_is_found_as_on_a_gpu(rows: list[list[float]]) -> None:
    """NaN before any number, and of several that are alike the first: a row with NaN has to be noticed."""
    scores = torch.tensor(rows)
    readback, on_gpu = Readback(), Readback()
    here, there = readback.argmax(scores), on_gpu._add_argmax(scores)
    on_gpu.wait()
    ids, values = here()
    for row, index, value in zip(rows, ids, values, strict=True):
        best = [score for score in row if math.isnan(score)] or [max(row)]
        assert index == [str(score) for score in row].index(str(best[0]))
        assert str(value) == str(best[0])
    assert (ids, str(values)) == (there()[0], str(there()[1]))


def test_the_largest_score_is_found_once_for_all_who_ask_of_the_same_tensor() -> None:
    readback, scores = Readback(), torch.tensor([[1.0, 2.0]])
    first, other = readback.argmax(scores), readback.argmax(scores.clone())
    assert readback.argmax(scores) is first
    assert other is not first


def test_an_upload_has_the_type_that_is_asked_for() -> None:
    assert upload([], torch.device("cpu"), torch.int64).dtype == torch.int64
    assert upload([1, 2], torch.device("cpu"), torch.float64).tolist() == [1.0, 2.0]
    assert upload([0.95, 2.0**-1000], torch.device("cpu"), torch.float64).tolist() == [0.95, 2.0**-1000]


@pytest.mark.parametrize("values", [[], [1, 2**40], [0.1, 2.0], (0.1, 1), [True, False], [[1, 2], [3, 4]]])
def test_an_upload_is_the_tensor_that_torch_makes_of_a_list(values: Any) -> None:
    made, uploaded = torch.as_tensor(values), upload(values, torch.device("cpu"))
    assert made.dtype == uploaded.dtype
    assert torch.equal(made, uploaded)


def test_an_upload_to_a_gpu_is_pinned_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        seen.append("pinned")
        return tensor

    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", send)
    assert upload([3, 4], torch.device("cuda")).tolist() == [3, 4]
    assert seen == ["pinned", ((torch.device("cuda"),), {"non_blocking": True})]


@pytest.mark.parametrize(
    "look",
    [
        lambda tensor: tensor.tolist(),
        torch.Tensor.nonzero,
        bool,
        lambda tensor: tensor[tensor > 0],
        lambda tensor: torch.tensor([1], device=tensor.device),
        lambda tensor: torch.as_tensor([1], device=tensor.device),
        lambda tensor: torch.ones(1).to(tensor.device),
        lambda tensor: tensor[[0]],
        lambda tensor: tensor.__setitem__([0], 2.0),
        lambda tensor: tensor.repeat_interleave(tensor.long()),
    ],
)
def test_the_counter_sees_a_wait(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as waits:
        look(torch.ones(1))
    assert waits.seen


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> ModelRuntime:
    config = EngineConfig(str(checkpoints.write("llama", tmp_path_factory.mktemp("llama"))), kv_cache_tokens=2048)
    return ModelRuntime(load(config, lambda _: None), config)


CONFIG = EngineConfig("the runtime's", kv_cache_tokens=2048)


def sessions(engine: Any, num_logprobs: int | None = None) -> list[Driver]:
    return [
        Driver(engine, [5 + place, 6, 7, 8], sampling, verification, f"{id(engine)} {place}", num_logprobs)
        for place, (sampling, verification) in enumerate(SAMPLINGS)
    ]


@pytest.mark.parametrize(("num_logprobs", "num_waits"), [(None, 1), (2, 2)])
def test_a_target_waits_once_a_round(
    runtime: ModelRuntime, num_logprobs: int | None, num_waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For blocks of all kinds at once; for log probabilities once more."""
    engine = TargetEngine(runtime, CONFIG, EPOCH)
    drafts = DraftEngine(runtime, CONFIG, EPOCH, 8)
    drivers, guessers = sessions(engine, num_logprobs), sessions(drafts)
    blocks = []
    for driver, guesser in zip(drivers, guessers, strict=True):
        driver.verify()
        guesser.log.extend(driver.log.tokens[len(guesser.log) :])
        blocks.append(guesser.draft(3))
    blocks[1] = TokenTree((9, 10, 11), (ROOT, ROOT, 0))  # coupled: a tree
    blocks[4] = EMPTY_BLOCK
    for driver, block in zip(drivers, blocks, strict=True):
        engine.add(driver.verify_request(block))
    with counted(monkeypatch) as waits:
        replies = engine.step()
    assert len(replies) == len(SAMPLINGS)
    assert waits.seen == ["readback"] * num_waits


def test_a_draft_waits_once_a_pass(runtime: ModelRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DraftEngine(runtime, CONFIG, EPOCH, 8)
    drivers = sessions(engine)
    for driver in drivers:
        is_coupled = driver.spec.verification is Verification.COUPLED
        growth = TreeSpec(2, 3, tail=(0.4, 0.2), num_passes=3) if is_coupled else TreeSpec.chain(3)
        engine.add(driver.draft_request(growth))
    num_steps, replies = 0, []
    with counted(monkeypatch) as waits:
        while engine.has_work:
            replies += engine.step()
            num_steps += 1
    assert len(replies) == len(SAMPLINGS)
    assert waits.seen == ["readback"] * num_steps
    assert num_steps >= 3
