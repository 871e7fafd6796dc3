"""One ragged forward equals eager transformers, rollback leaves nothing behind, and neighbours change nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError
from core.speculation.token_tree import ROOT, TokenTree
from tests import checkpoints
from workers.runtime.runtime import ModelRuntime
from workers.runtime.tiling import choose_tiling
from workers.step.kv_cache import OutOfBlocks
from workers.step.rows import StepRows

DTYPES = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])


@pytest.fixture(scope="module", params=["llama", "mistral"])
def family(request: pytest.FixtureRequest) -> str:
    """Full attention, and a window of 24."""
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


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(checkpoints.VOCAB_SIZE) for _ in range(count)]


@torch.inference_mode()
def eager_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position.  # [len(ids), vocab]"""
    logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0, :, : checkpoints.VOCAB_SIZE]
    return logits


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to one part in 100,000 of the largest logit, which is what float32 leaves after another order of sums."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * max(1.0, float(want.abs().max())))


def held(runtime: ModelRuntime, ids: Sequence[int]) -> Any:
    """A sequence whose KV holds `ids`."""
    kv = runtime.cache.new_sequence()
    runtime.forward([StepRows(kv, ids, wants_logits=False)])
    return kv


def path_tokens(tree: TokenTree, node: int) -> list[int]:
    """The tokens from the root's child down to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return path


def random_tree(rng: random.Random, size: int) -> TokenTree:
    return TokenTree(tuple(tokens(rng, size)), tuple(rng.randint(ROOT, node - 1) for node in range(size)))


def test_prefill_decode_chain_and_tree_in_one_step_equal_eager(runtime: ModelRuntime, eager: Any) -> None:
    rng = random.Random(1)
    a, b, c, d, e = (tokens(rng, count) for count in (60, 45, 30, 28, 90))
    kv_a, kv_b, kv_c, kv_e = (held(runtime, ids) for ids in (a[:20], b[:44], c[:22], e[:40]))
    tree = random_tree(rng, 6)
    logits = runtime.forward(
        [
            StepRows(kv_a, a[20:50], wants_logits=False),
            StepRows(kv_b, b[44:]),
            StepRows(kv_c, c[22:24], TokenTree.chain(c[24:])),
            StepRows(runtime.cache.new_sequence(), d, tree),
            StepRows(kv_e, e[40:]),
        ]
    )
    want = [eager_logits(eager, b)[-1:], eager_logits(eager, c)[23:], eager_logits(eager, d)[-1:]]
    want += [eager_logits(eager, d + path_tokens(tree, node))[-1:] for node in range(6)]
    want += [eager_logits(eager, e)[-1:]]
    assert logits.dtype == torch.float32
    assert_same(logits, torch.cat(want))
    assert kv_a.num_tokens == 50
    assert_same(runtime.forward([StepRows(kv_a, a[50:])]), eager_logits(eager, a)[-1:])
    runtime.cache.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_equals_its_paths_taken_one_by_one(runtime: ModelRuntime, eager: Any, seed: int) -> None:
    rng = random.Random(seed)
    prefix, tree = tokens(rng, rng.randint(2, 50)), random_tree(rng, 12)
    kv = held(runtime, prefix[:-1])
    got = runtime.forward([StepRows(kv, prefix[-1:], tree)])
    want = [eager_logits(eager, prefix + path_tokens(tree, node))[-1] for node in range(ROOT, len(tree))]
    assert_same(got, torch.stack(want))


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_that_grows_step_by_step_beside_others_equals_its_paths(
    runtime: ModelRuntime, eager: Any, seed: int
) -> None:
    """Rows below nodes whose KV is there, of two sequences, with a prefill and a plain step in the same forward."""
    rng = random.Random(seed)
    prefixes = [tokens(rng, rng.randint(2, 50)) for _ in range(2)]
    trees = [random_tree(rng, 15), random_tree(rng, 40)]
    kvs = [held(runtime, prefix[:-1]) for prefix in prefixes]
    got: list[list[torch.Tensor]] = [[], []]
    fed = [0, 0]
    prompt, plain, first = tokens(rng, 70), tokens(rng, 9), True
    kv_prompt, kv_plain = runtime.cache.new_sequence(), held(runtime, plain[:3])
    while fed != [15, 40]:
        upto = [
            min(len(tree), count + rng.randint(0 if first else 1, 9)) for tree, count in zip(trees, fed, strict=True)
        ]
        batch = [StepRows(kv_prompt, prompt[kv_prompt.num_tokens :][:11], wants_logits=False)]
        batch = batch if batch[0].tokens else []
        for which, (kv, prefix, tree) in enumerate(zip(kvs, prefixes, trees, strict=True)):
            rows = StepRows(kv, prefix[-1:] if first else [], tree.prefix(upto[which]), fed[which])
            batch += [rows] if rows.num_rows else []
        batch.append(StepRows(kv_plain, tokens(rng, 1)))
        logits = iter(runtime.forward(batch))
        for which in range(2):
            got[which] += [next(logits) for _ in range(upto[which] - fed[which] + first)]
        fed, first = upto, False
    for which, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        want = [eager_logits(eager, prefix + path_tokens(tree, node))[-1] for node in range(ROOT, len(tree))]
        assert_same(torch.stack(got[which]), torch.stack(want))


def test_an_accepted_path_is_compacted_into_what_a_fresh_sequence_holds(runtime: ModelRuntime, eager: Any) -> None:
    rng = random.Random(3)
    prefix, after = tokens(rng, 37), tokens(rng, 3)
    tree = TokenTree(tuple(tokens(rng, 6)), (ROOT, ROOT, 0, 1, 1, 4))
    kv = held(runtime, prefix[:-1])
    runtime.forward([StepRows(kv, prefix[-1:], tree)])
    runtime.cache.compact(kv, len(prefix), [1, 4, 5])
    assert kv.num_tokens == len(prefix) + 3
    ids = prefix + path_tokens(tree, 5) + after
    assert_same(runtime.forward([StepRows(kv, after[:1], TokenTree.chain(after[1:]))]), eager_logits(eager, ids)[-3:])


def test_after_a_rollback_nothing_of_the_rejected_tokens_is_left(runtime: ModelRuntime, eager: Any) -> None:
    rng = random.Random(4)
    prefix, rejected, after = tokens(rng, 30), tokens(rng, 7), tokens(rng, 5)
    want = eager_logits(eager, prefix + after)[-5:]

    def continued(*, roll_back: bool) -> torch.Tensor:
        kv = held(runtime, prefix[:-1])
        runtime.forward([StepRows(kv, prefix[-1:], TokenTree.chain(rejected))])
        if roll_back:
            runtime.cache.truncate(kv, len(prefix))
        return runtime.forward([StepRows(kv, after[:1], TokenTree.chain(after[1:]))])

    assert_same(continued(roll_back=True), want)
    with pytest.raises(AssertionError):  # this test would notice if the rollback were forgotten
        assert_same(continued(roll_back=False), want)


def in_all_ways(runtime: ModelRuntime, seqs: list[list[int]], nexts: list[list[int]]) -> list[torch.Tensor]:
    """The logits of `nexts` after `seqs`: stepwise and verified at once, alone and in a batch.  # 4 x [B, 8, vocab]"""

    def start(some: Sequence[list[int]]) -> list[Any]:
        return [held(runtime, ids) for ids in some]

    def steps(kvs: list[Any], some: list[list[int]]) -> torch.Tensor:
        columns = zip(*some, strict=True)
        outs = [runtime.forward([StepRows(kv, [t]) for kv, t in zip(kvs, column, strict=True)]) for column in columns]
        return torch.stack(outs, dim=1)

    def verify(kvs: list[Any], some: list[list[int]]) -> torch.Tensor:
        rows = [StepRows(kv, ids[:1], TokenTree.chain(ids[1:])) for kv, ids in zip(kvs, some, strict=True)]
        return runtime.forward(rows).unflatten(0, (len(some), -1))

    results = []
    for run in (steps, verify):
        results.append(torch.cat([run(start([ids]), [some]) for ids, some in zip(seqs, nexts, strict=True)]))
        results.append(run(start(seqs), nexts))
    return results


def test_neighbours_and_number_of_rows_change_no_logits(runtime: ModelRuntime) -> None:
    rng = random.Random(5)
    seqs, nexts = [tokens(rng, rng.randint(1, 60)) for _ in range(16)], [tokens(rng, 8) for _ in range(16)]
    first, *others = in_all_ways(runtime, seqs, nexts)
    for other in others:
        assert_same(other, first)


@DTYPES
def test_deterministic_steps_change_not_a_bit(checkpoint: Path, dtype: str) -> None:
    runtime = checkpoints.runtime(checkpoint, dtype=dtype, deterministic=True, kv_cache_tokens=16384)
    rng = random.Random(6)
    seqs, nexts = [tokens(rng, rng.randint(1, 250)) for _ in range(6)], [tokens(rng, 8) for _ in range(6)]
    seqs[0] = tokens(rng, 500)  # passes from one block of 512 to the next
    nexts[0] = tokens(rng, 8)
    first, *others = in_all_ways(runtime, seqs, nexts)
    for other in others:
        assert torch.equal(other, first)


@DTYPES
def test_deterministic_trees_are_their_chains_bit_for_bit(checkpoint: Path, dtype: str) -> None:
    """At once, and grown in two steps beside another sequence; chains are taken token by token."""
    runtime = checkpoints.runtime(checkpoint, dtype=dtype, deterministic=True, kv_cache_tokens=16384)
    rng = random.Random(9)
    for length, size in ((3, 6), (200, 25), (500, 12)):
        prefix, tree = tokens(rng, length), random_tree(rng, size)
        at_once = runtime.forward([StepRows(held(runtime, prefix[:-1]), prefix[-1:], tree)])
        kv, other = held(runtime, prefix[:-1]), held(runtime, tokens(rng, 7))
        first = runtime.forward([StepRows(kv, prefix[-1:], tree.prefix(size // 2))])
        rest = runtime.forward([StepRows(other, [1]), StepRows(kv, [], tree, size // 2)])[1:]
        alone = held(runtime, prefix[:-1])
        for node in range(ROOT, size):
            runtime.cache.truncate(alone, length - 1)
            for token in [prefix[-1], *path_tokens(tree, node)]:
                want = runtime.forward([StepRows(alone, [token])])[0]
            assert torch.equal(at_once[1 + node], want)
            assert torch.equal(torch.cat([first, rest])[1 + node], want)


def test_deterministic_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="needs compile: true and a single rank"):
        choose_tiling(EngineConfig(model="m", device="cuda", deterministic=True))
    with pytest.raises(ConfigError, match="divide 512"):
        choose_tiling(EngineConfig(model="m", block_tokens=24, deterministic=True))
    assert choose_tiling(EngineConfig(model="m", device="cuda:1")).min_rows == 1


def test_a_step_that_does_not_fit_changes_nothing(checkpoint: Path, eager: Any) -> None:
    runtime = checkpoints.runtime(checkpoint, kv_cache_tokens=64)
    ids = tokens(random.Random(7), 50)
    kv, other = held(runtime, ids[:40]), runtime.cache.new_sequence()
    free = runtime.num_free_tokens
    with pytest.raises(OutOfBlocks):
        runtime.forward([StepRows(kv, ids[40:]), StepRows(other, ids)])
    assert (kv.num_tokens, other.num_tokens, runtime.num_free_tokens) == (40, 0, free)
    assert_same(runtime.forward([StepRows(kv, ids[40:])]), eager_logits(eager, ids)[-1:])


def test_a_broken_neighbour_spoils_no_one(runtime: ModelRuntime) -> None:
    rng = random.Random(8)
    ids, step = tokens(rng, 20), tokens(rng, 1)
    good, bad = held(runtime, ids), held(runtime, tokens(rng, 33))
    want = runtime.forward([StepRows(good, step)])
    runtime.cache.truncate(good, len(ids))
    for row in range(33):
        runtime.cache.values[0][runtime.cache.slot(bad, row)] = torch.nan
    got = runtime.forward([StepRows(good, step), StepRows(bad, step)])
    assert got[1].isnan().any()
    assert_same(got[0], want[0])


def test_a_step_in_which_nobody_wants_logits_has_none(runtime: ModelRuntime) -> None:
    kv = runtime.cache.new_sequence()
    assert runtime.forward([StepRows(kv, [1, 2], wants_logits=False)]).shape == (0, checkpoints.VOCAB_SIZE)


def test_warm_up_leaves_no_trace(checkpoint: Path) -> None:
    runtime = checkpoints.runtime(checkpoint, kv_cache_tokens=100, block_tokens=16, max_step_tokens=64)
    assert runtime.num_free_tokens == 112
    runtime.warm_up()
    assert runtime.num_free_tokens == 112
    runtime.cache.check_integrity()


def test_broken_invariants_of_the_caller_are_caught(runtime: ModelRuntime) -> None:
    kv = runtime.cache.new_sequence()
    for rows, problem in [
        ([StepRows(kv, [checkpoints.SIZES["vocab_size"]])], "token id 304 of 304"),
        ([StepRows(kv, [-1])], "token id -1"),
        ([StepRows(kv, [])], "a row at least"),
        ([StepRows(kv, [1]), StepRows(kv, [2])], "in a step once"),
        ([StepRows(kv, [], TokenTree.chain([1]))], "a tree has a root"),
        ([StepRows(held(runtime, [1]), [], TokenTree.chain([1, 2]), 1)], "a tree has a root"),
        ([StepRows(held(runtime, [1, 2, 3]), [4], TokenTree.chain([1, 2]), 1)], "tokens come before"),
        ([StepRows(kv, [1] * 512, TokenTree.chain([1]))], "beyond the model's context"),
        ([], "an empty step"),
    ]:
        with pytest.raises(AssertionError, match=problem):
            runtime.forward(rows)
