"""Engines on the simulated GPU: no operator mixes devices, the host waits once a step, and the text is the CPU's."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig
from core.records import Sampling, Verification
from core.speculation import EMPTY_BLOCK, ROOT, TokenTree
from core.speculation.growth import TreeSpec
from tests import checkpoints
from tests.simulated_gpu.device import Counts, SimulatedGPU
from tests.workers.engine.driving import EPOCH, Driver, answer_all, chain, wrong
from tests.workers.engine.growths import allowed, wide
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.runtime.backends import CudaGraphBackend
from workers.step.kv_dtype import FP8

pytestmark = pytest.mark.thorough

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3")
CONTAINED = {"mistral", "qwen3"}
"""Families whose operators others have, too: a window, and norms of queries and keys."""
SAMPLINGS = (
    Sampling(1.0, seed=1),
    Sampling(0.7, top_k=20, top_p=0.9, seed=2),
    Sampling(1.2, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3, seed=3),
    Sampling(0.9, logit_bias=((7, 2.0),), min_tokens=4, suppressed_ids=(9,), bad_words=((3, 4), (5,)), seed=4),
    Sampling(0.0),
    Sampling(0.0, allowed_token_ids=(7, 8, 9), presence_penalty=0.5),
)


def settings(path: Path, device: str, **others: Any) -> EngineConfig:
    sizes = {"kv_cache_tokens": 1024, "max_step_tokens": 16, "device": device}
    return EngineConfig(str(path), **sizes | others)


def target_on(path: Path, device: str, **others: Any) -> TargetEngine:
    engine = TargetEngine.load(settings(path, device, **others), EPOCH, lambda _: None)
    engine.warm_up(lambda _: None)
    return engine


def draft_on(path: Path, device: str, **others: Any) -> DraftEngine:
    engine = DraftEngine.load(settings(path, device, **others), EPOCH, 16, lambda _: None)
    engine.warm_up(lambda _: None)
    return engine


def prompt(seed: int, num_tokens: int = 20) -> list[int]:
    return random.Random(seed).choices(range(250), k=num_tokens)


def drivers_of(
    engine: Any, rule: Verification = Verification.COUPLED, samplings: Sequence[Sampling] = SAMPLINGS
) -> list[Driver]:
    return [
        Driver(engine, prompt(seed), sampling, rule, session=f"{rule}-{seed}", num_logprobs=2 if seed == 1 else None)
        for seed, sampling in enumerate(samplings)
    ]


def verify_together(drivers: list[Driver], blocks: list[TokenTree]) -> list[Any]:
    """One step of all of them; returns their verdicts."""
    requests = [driver.verify_request(block) for driver, block in zip(drivers, blocks, strict=True)]
    verdicts = answer_all(drivers[0].engine, requests)
    for driver, block, verdict in zip(drivers, blocks, verdicts, strict=True):
        driver.log.extend([*(block.tokens[node] for node in verdict.path), verdict.next_token])
        driver.held = verdict.held
    return verdicts


def greedy_texts(engine: TargetEngine) -> list[list[int]]:
    """Plain steps, chains and trees, some accepted in part, of sessions that share steps."""
    drivers = [Driver(engine, prompt(seed), session=str(seed)) for seed in range(3)]
    verify_together(drivers, [EMPTY_BLOCK] * 3)
    for _ in range(3):
        blocks = [chain(1, 2, 3), TokenTree((1, 2, 3, 4), (ROOT, ROOT, 1, 0)), EMPTY_BLOCK]
        verify_together(drivers, blocks)
        first, last = (driver.verify().next_token for driver in (drivers[0], drivers[2]))
        verify_together(drivers, [chain(first, wrong(first)), TokenTree((last, 1, last), (ROOT, ROOT, 0)), chain(5)])
    return [list(driver.log.tokens) for driver in drivers]


def sampled_texts(engine: TargetEngine) -> list[list[int]]:
    """Texts of coupled sampling with parameters of all kinds, in shared steps."""
    drivers = drivers_of(engine)
    for block in (EMPTY_BLOCK, chain(1, 2, 3), TokenTree((1, 2, 3, 4), (ROOT, ROOT, 1, 0)), EMPTY_BLOCK):
        verify_together(drivers, [block] * len(drivers))
    return [list(driver.log.tokens) for driver in drivers]


@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        pytest.param(family, True, id=f"{family}-recorded", marks=pytest.mark.slow if family in CONTAINED else ())
        for family in FAMILIES
    ]
    + [
        pytest.param(family, False, id=f"{family}-eager", marks=() if family == "llama" else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_a_target_writes_what_it_writes_on_a_cpu(
    family: str, compiled: bool, gpu: SimulatedGPU, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoints.write(family, tmp_path)
    with caplog.at_level(logging.WARNING):
        there = target_on(path, "cuda", compile=compiled)
    assert not caplog.records
    here = target_on(path, "cpu")
    assert greedy_texts(there) == greedy_texts(here)
    assert sampled_texts(there) == sampled_texts(here)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def recorded(gpu: SimulatedGPU, llama: Path) -> TargetEngine:
    """An engine whose steps are recorded. Each test has sessions of other names."""
    return target_on(llama, "cuda", compile=True)


@pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="eager", marks=pytest.mark.slow), pytest.param(True, id="recorded")]
)
def test_draft_and_target_write_what_they_write_on_a_cpu_by_every_rule(
    compiled: bool, gpu: SimulatedGPU, llama: Path
) -> None:
    pairs = [
        (target_on(llama, device, compile=compiled and device == "cuda"), draft_on(llama, device))
        for device in ("cuda", "cpu")
    ]
    for rule in Verification:
        there, here = (rounds(*pair, rule) for pair in pairs)
        assert there == here, rule


def rounds(target: TargetEngine, draft: DraftEngine, rule: Verification) -> list[list[int]]:
    """The text of sessions, one of them greedy, whose chains and trees a draft with the same weights grows."""
    verifying, drafting = (drivers_of(engine, rule, SAMPLINGS[1::2]) for engine in (target, draft))
    verify_together(verifying, [EMPTY_BLOCK] * len(verifying))
    for growth in (TreeSpec.chain(3), wide(4, 2)):
        for verifier, drafter in zip(verifying, drafting, strict=True):
            drafter.log.extend(verifier.log.tokens[len(drafter.log) :])
        verify_together(verifying, [drafter.draft(allowed(growth, drafter.spec)) for drafter in drafting])
    for engine in (target, draft):
        engine.release([driver.session for driver in verifying])
    return [list(driver.log.tokens) for driver in verifying]


def step_counts(gpu: SimulatedGPU, drivers: list[Driver], block: TokenTree = EMPTY_BLOCK) -> Counts:
    """Counts of one step that all drivers share, after one like it."""
    for _ in range(2):
        gpu.counts = Counts()
        verify_together(drivers, [block] * len(drivers))
    return gpu.counts


BLOCKS = {"plain": EMPTY_BLOCK, "chain": chain(1, 2, 3), "tree": TokenTree((1, 2, 3), (ROOT, ROOT, 1))}


@pytest.mark.parametrize(
    ("block", "num_sessions"),
    [
        pytest.param(block, num, id=f"{name}-{num}", marks=() if (name == "tree") == (num == 3) else pytest.mark.slow)
        for name, block in BLOCKS.items()
        for num in (1, 3)
    ],
)
def test_a_recorded_greedy_step_uploads_once_and_waits_once(
    block: TokenTree, num_sessions: int, gpu: SimulatedGPU, recorded: TargetEngine
) -> None:
    assert [type(backend) for backend in recorded._runtime.backends._built][:1] == [CudaGraphBackend]
    drivers = [Driver(recorded, prompt(seed), session=f"{block} {seed}") for seed in range(num_sessions)]
    verify_together(drivers, [EMPTY_BLOCK] * num_sessions)
    counts = step_counts(gpu, drivers, block)
    assert (counts.uploads, len(counts.waits), counts.replays) == (1, 1, 1)
    assert (gpu.recorded.uploads, gpu.recorded.waits) == (0, [])


def test_steps_of_a_prompt_are_queued_before_the_last_one_is_read(gpu: SimulatedGPU, recorded: TargetEngine) -> None:
    """Nothing depends on the chunks before the last one: the host waits for the device once, after all three steps."""
    recorded.add(Driver(recorded, prompt(9, 40), session="prompt").verify_request())
    gpu.counts, seen = Counts(), []
    while recorded.has_work:
        recorded.step()
        seen.append((gpu.counts.replays, len(gpu.counts.waits)))
    assert seen == [(1, 0), (2, 0), (3, 1)]


@pytest.mark.parametrize("compiled", [pytest.param(False, id="eager", marks=pytest.mark.slow), True])
def test_guesses_change_no_token_where_kv_is_rounded(
    compiled: bool, gpu: SimulatedGPU, llama: Path, recorded: TargetEngine
) -> None:
    """And the rounded KV is not that of a model without rounding."""
    rounded = target_on(llama, "cuda", compile=compiled, kv_dtype="fp8")
    assert {pool.dtype for pool in (*rounded._runtime.cache.keys, *rounded._runtime.cache.values)} == {FP8}
    plain, guided = (Driver(rounded, prompt(1, 40), session=name) for name in ("plain", "guided"))
    want = plain.run(24)
    guided.verify()
    num_accepted = 0
    while len(guided.log) < 40 + 20:
        right = want[len(guided.log) - 40 :][:2]
        verdict = guided.verify(TokenTree((wrong(right[0]), *right, 3), (ROOT, ROOT, 1, 0)))
        num_accepted += len(verdict.path)
    assert list(guided.log.tokens[40:]) == want[: len(guided.log) - 40]
    assert num_accepted >= 10
    assert logprobs_of(rounded) != logprobs_of(recorded)


def logprobs_of(engine: TargetEngine) -> Any:
    driver = Driver(engine, prompt(2), session="logprobs", num_logprobs=2)
    return [driver.verify().logprobs for _ in range(3)]


KERNELS = {
    "llama": (21, 35),
    "phi3": (21, 36),
    "qwen3": (21, 47),
    "gemma2": (26, 51),
    "gemma3_text": (23, 65),
    "gpt_neox": (17, 25),
    "deepseek_v3": (21, 56),
}
"""Kernels of the model's own code in float32: outside of layers, and in each layer."""


@pytest.mark.parametrize("family", KERNELS)
def test_kernels_of_a_layer(family: str, gpu: SimulatedGPU, tmp_path: Path) -> None:
    found = []
    for num_layers in (2, 3):
        like = {"layer_types": ["full_attention"] * num_layers} if family.startswith("gemma") else {}
        if family == "deepseek_v3":
            like = {"first_k_dense_replace": num_layers}  # no experts
        path = checkpoints.write(family, tmp_path / str(num_layers), num_hidden_layers=num_layers, **like)
        driver = Driver(TargetEngine.load(settings(path, "cuda"), EPOCH, lambda _: None), prompt(0))
        driver.verify()
        found.append(step_counts(gpu, [driver]).kernels.total())
    of_layer = found[1] - found[0]
    assert (found[0] - 2 * of_layer, of_layer) == KERNELS[family]
