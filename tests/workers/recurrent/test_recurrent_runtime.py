"""Recurrent layers give eager transformers' logits, whatever was rolled back, shares a pass, or was cut into chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.speculation.token_tree import ROOT, TokenTree
from tests import checkpoints
from tests.workers.runtime.test_runtime import eager_logits, held, path_tokens, random_tree, tokens
from workers.runtime.runtime import ModelRuntime
from workers.step.rows import StepRows
from workers.step.states import OutOfBlocks


@pytest.fixture(scope="module", params=["qwen3_5_text", "bamba", "falcon_h1", "lfm2", "jamba"])
def family(request: pytest.FixtureRequest) -> str:
    """Each kind of mixer; attention between, beside and not at all near them."""
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(family, tmp_path_factory.mktemp(family))


@pytest.fixture
def runtime(checkpoint: Path) -> ModelRuntime:
    return checkpoints.runtime(checkpoint)


@pytest.fixture(scope="module")
def eager(family: str) -> Any:
    return checkpoints.build(family)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to one part in 10,000 of the largest logit: a state sums up the rounding of all rows before."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * max(1.0, float(want.abs().max())))


def paths_logits(eager: Any, prefix: list[int], tree: TokenTree) -> torch.Tensor:
    """Logits of the last token and of each node. All paths at once: nothing depends on what comes after it."""
    paths = [prefix + path_tokens(tree, node) for node in range(ROOT, len(tree))]
    longest = max(map(len, paths))
    with torch.inference_mode():
        logits = eager(torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])).logits
    lasts = [len(path) - 1 for path in paths]
    return logits[range(len(paths)), lasts, : checkpoints.VOCAB_SIZE]


def test_a_prompt_in_chunks_equals_the_whole(runtime: ModelRuntime, eager: Any) -> None:
    """Chunks of one token, of a few, and of more than are taken one by one."""
    ids = tokens(random.Random(1), 150)
    kv = runtime.cache.new_sequence()
    first = 0
    for size in (1, 2, 40, 3, 1, 64, 39):
        got = runtime.forward([StepRows(kv, ids[first : first + size])])
        first += size
        assert_same(got, eager_logits(eager, ids[:first])[-1:])
    runtime.cache.check_integrity()


def test_each_branch_of_a_tree_has_states_of_its_own(runtime: ModelRuntime, eager: Any) -> None:
    rng = random.Random(2)
    prefix, tree = tokens(rng, 37), random_tree(rng, 14)
    got = runtime.forward([StepRows(held(runtime, prefix[:-1]), prefix[-1:], tree)])
    assert_same(got, paths_logits(eager, prefix, tree))


def test_a_tree_grows_over_passes_beside_others(runtime: ModelRuntime, eager: Any) -> None:
    rng = random.Random(3)
    prefix, tree, prompt = tokens(rng, 20), random_tree(rng, 12), tokens(rng, 90)
    kv, other = held(runtime, prefix[:-1]), runtime.cache.new_sequence()
    rows = [StepRows(kv, prefix[-1:], tree.prefix(3)), StepRows(kv, [], tree.prefix(8), 3), StepRows(kv, [], tree, 8)]
    got = []
    for index, each in enumerate(rows):
        part = StepRows(other, prompt[30 * index : 30 * index + 30])
        logits = runtime.forward([part, each])
        assert_same(logits[:1], eager_logits(eager, prompt[: 30 * index + 30])[-1:])
        got.append(logits[1:])
    assert_same(torch.cat(got), paths_logits(eager, prefix, tree))


def test_after_a_verdict_the_state_is_that_of_the_accepted_path(runtime: ModelRuntime, eager: Any) -> None:
    """Round after round, with the path's nodes in between rejected ones."""
    rng = random.Random(4)
    ids = tokens(rng, 20)
    kv = held(runtime, ids[:-1])
    tree = TokenTree((5, 6, 7, 8, 9, 10), (ROOT, ROOT, 0, 1, 1, 4))
    for path in ([1, 4, 5], [], [0], [1, 3]):
        got = runtime.forward([StepRows(kv, ids[-1:], tree)])
        assert_same(got, paths_logits(eager, ids, tree))
        runtime.cache.compact(kv, len(ids), path)
        ids += [*(tree.tokens[node] for node in path), rng.randrange(200)]
        runtime.cache.check_integrity()


def test_a_forgotten_rollback_would_be_noticed(runtime: ModelRuntime, eager: Any) -> None:
    rng = random.Random(5)
    prefix, rejected, after = tokens(rng, 30), tokens(rng, 7), tokens(rng, 5)
    want = eager_logits(eager, prefix + after)[-5:]

    def continued(*, roll_back: bool) -> torch.Tensor:
        kv = held(runtime, prefix[:-1])
        runtime.forward([StepRows(kv, prefix[-1:], TokenTree.chain(rejected))])
        if roll_back:
            runtime.cache.truncate(kv, len(prefix))
        else:  # the KV is rolled back, the state is not
            stale = kv.states[kv.num_tokens]
            runtime.cache.truncate(kv, len(prefix))
            runtime.cache.states._free[runtime.cache.states._free.index(stale)] = kv.states[len(prefix)]
            kv.states[len(prefix)] = stale
        return runtime.forward([StepRows(kv, after[:1], TokenTree.chain(after[1:]))])

    assert_same(continued(roll_back=True), want)
    with pytest.raises(AssertionError):
        assert_same(continued(roll_back=False), want)


def test_sequences_of_one_pass_do_not_mix(runtime: ModelRuntime, eager: Any) -> None:
    """Sequences of different lengths, some new, with blocks of different sizes, over several passes."""
    rng = random.Random(6)
    texts = [tokens(rng, length) for length in (1, 2, 33, 50, 70)]
    kvs = [held(runtime, ids[:-1]) if len(ids) > 1 else runtime.cache.new_sequence() for ids in texts]
    for _ in range(3):
        trees = [random_tree(rng, rng.randint(0, 5)) for _ in texts]
        batch = [StepRows(kv, ids[-1:], tree) for kv, ids, tree in zip(kvs, texts, trees, strict=True)]
        got = runtime.forward(batch)
        assert_same(got, torch.cat([paths_logits(eager, *each) for each in zip(texts, trees, strict=True)]))
        for kv, ids in zip(kvs, texts, strict=True):
            runtime.cache.truncate(kv, len(ids))
            ids.append(rng.randrange(200))


def test_a_new_sequence_in_used_slots_begins_with_no_state(runtime: ModelRuntime, eager: Any) -> None:
    rng = random.Random(7)
    free = runtime.cache.states.num_free
    for length in (40, 3, 1):
        ids = tokens(rng, length)
        kv = runtime.cache.new_sequence()
        assert_same(runtime.forward([StepRows(kv, ids)]), eager_logits(eager, ids)[-1:])
        runtime.cache.free(kv)
        assert runtime.cache.states.num_free == free


def test_nan_of_one_sequence_stays_in_its_states(runtime: ModelRuntime) -> None:
    rng = random.Random(8)
    ids, step = tokens(rng, 20), tokens(rng, 1)
    good, bad = held(runtime, ids), held(runtime, tokens(rng, 33))
    want = runtime.forward([StepRows(good, step)])
    runtime.cache.truncate(good, len(ids))
    for mixer in runtime._states.mixers:
        for pool in mixer.pools.values():
            pool[bad.states[33]] = torch.nan
    got = runtime.forward([StepRows(good, step), StepRows(bad, step)])
    assert got[1].isnan().all()
    assert_same(got[0], want[0])
    runtime.cache.free(bad)
    fresh = runtime.cache.new_sequence()
    assert runtime.forward([StepRows(fresh, ids)]).isfinite().all()


def test_a_sequence_goes_back_to_a_state_that_was_kept(runtime: ModelRuntime, eager: Any) -> None:
    ids = tokens(random.Random(9), 30)
    kv = held(runtime, ids[:20])
    for token in ids[20:25]:
        runtime.forward([StepRows(kv, [token])])
    states = runtime.cache.states
    runtime.cache.truncate(kv, 24)
    assert states.resumable(kv) == 24
    assert_same(runtime.forward([StepRows(kv, ids[24:30])]), eager_logits(eager, ids)[-1:])
    runtime.cache.truncate(kv, 27)
    assert states.resumable(kv) == 0, "states in the middle of a chunk are not kept"
    runtime.cache.truncate(kv, 0)
    assert_same(runtime.forward([StepRows(kv, ids)]), eager_logits(eager, ids)[-1:])


def test_a_step_without_room_for_its_states_changes_nothing(runtime: ModelRuntime, eager: Any) -> None:
    rng, states = random.Random(10), runtime.cache.states
    ids = tokens(rng, 20)
    kv = held(runtime, ids)
    free = states.num_free
    with pytest.raises(OutOfBlocks):
        runtime.forward([StepRows(kv, [1], random_tree(rng, states.num_states))])
    assert (kv.num_tokens, states.num_free) == (20, free)
    assert_same(runtime.forward([StepRows(kv, [1])]), eager_logits(eager, [*ids, 1])[-1:])


def ways(runtime: ModelRuntime, prefix: list[int], tree: TokenTree) -> Sequence[torch.Tensor]:
    """Logits of a tree after a prompt: at once, in two passes beside another prompt, and path by path."""
    at_once = runtime.forward([StepRows(held(runtime, prefix[:-1]), prefix[-1:], tree)])
    kv, half = held(runtime, prefix[:5]), len(tree) // 2
    first = runtime.forward([StepRows(kv, prefix[5:], tree.prefix(half))])
    batch = [StepRows(runtime.cache.new_sequence(), prefix[:9]), StepRows(kv, [], tree, half)]
    grown = torch.cat([first, runtime.forward(batch)[1:]])
    alone = []
    for node in range(ROOT, len(tree)):
        path = held(runtime, prefix[:-1])
        for token in [prefix[-1], *path_tokens(tree, node)]:
            logits = runtime.forward([StepRows(path, [token])])
        alone.append(logits[0])
        runtime.cache.free(path)
    return at_once, grown, torch.stack(alone)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_deterministic_passes_change_not_a_bit(family: str, checkpoint: Path, dtype: str) -> None:
    """Also where a prompt is cut elsewhere: its rows are computed one by one."""
    if family == "jamba":
        pytest.skip("its experts are summed in an order that depends on the other rows, which an engine warns of")
    runtime = checkpoints.runtime(checkpoint, dtype=dtype, deterministic=True)
    rng = random.Random(11)
    at_once, grown, alone = ways(runtime, tokens(rng, 24), random_tree(rng, 6))
    assert torch.equal(at_once, alone)
    assert torch.equal(grown, alone)
