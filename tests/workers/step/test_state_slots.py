"""Slots of recurrent states: which rows a pass reads and writes, and that none is lost or has two owners."""

from __future__ import annotations

import random

import pytest
import torch

from core.speculation.token_tree import ROOT, TokenTree
from workers.step.kv_cache import KVCache, LayerShape, SequenceKV
from workers.step.rows import StepRows, flatten
from workers.step.states import INITIAL, OutOfBlocks, StateRows

NUM_STATES = 40


def make_cache(num_states: int = NUM_STATES) -> KVCache:
    return KVCache([LayerShape(1, 2, 2), LayerShape()], 64, 4, torch.float32, torch.device("cpu"), num_states)


def run(cache: KVCache, *batch: StepRows, max_stepped: int | None = None) -> list[StateRows]:
    """A pass of these rows; returns its calls."""
    cache.states.reserve_all((item.kv, item.num_states) for item in batch)
    cache.reserve_all((item.kv, item.kv.num_tokens + item.num_rows) for item in batch)
    spans = flatten(batch).spans
    calls = cache.states.plan(spans, max_stepped)
    for span in spans:
        cache.extend(span.kv, span.num_rows)
    cache.states.end_step(spans)
    cache.check_integrity()
    return calls


def test_tokens_go_through_one_slot_and_nodes_have_slots_of_their_own() -> None:
    cache = make_cache()
    kv, other = cache.new_sequence(), cache.new_sequence()
    tree = TokenTree((1, 2, 3, 4), (ROOT, ROOT, 0, 0))
    calls = run(cache, StepRows(kv, [7, 8], tree), StepRows(other, [9]))
    states, last = kv.states, kv.states[2]
    assert calls == [
        StateRows([0, 6], [INITIAL, INITIAL], [last, other.states[1]]),
        StateRows([1], [last], [last]),
        StateRows([2, 3], [last, last], [states[3], states[4]]),
        StateRows([4, 5], [states[3], states[3]], [states[5], states[6]]),
    ]
    assert len({*states.values(), *other.states.values()}) == 6


def test_many_tokens_are_one_call_before_their_nodes() -> None:
    cache = make_cache()
    kv = cache.new_sequence()
    chunk, node = run(cache, StepRows(kv, [1] * 5, TokenTree.chain((2,))), max_stepped=4)
    assert chunk == StateRows([0, 1, 2, 3, 4], [INITIAL], [kv.states[5]], is_chunk=True)
    assert node == StateRows([5], [kv.states[5]], [kv.states[6]])


def test_a_path_takes_its_states_along_and_the_others_become_free() -> None:
    cache = make_cache()
    kv = cache.new_sequence()
    run(cache, StepRows(kv, [1, 2]))
    run(cache, StepRows(kv, [3], TokenTree((4, 5, 6, 7), (ROOT, ROOT, 1, 2))))
    before = dict(kv.states)
    cache.compact(kv, 3, [1, 2])
    assert kv.states == {2: before[2], 3: before[3], 4: before[5], 5: before[6]}
    assert cache.states.num_free == NUM_STATES - 4
    (call,) = run(cache, StepRows(kv, [8]))
    assert call.sources == [before[6]]
    assert {*kv.states} == {5, 6}, "the last row and the one before"


def test_without_room_nothing_is_reserved() -> None:
    cache = make_cache(4)
    kv, other = cache.new_sequence(), cache.new_sequence()
    with pytest.raises(OutOfBlocks, match="5 states needed, 4 free"):
        cache.states.reserve_all([(kv, 3), (other, 2)])
    assert cache.states.num_free == 4
    cache.states.reserve_all([(kv, 3)])
    cache.truncate(kv, 0)
    assert cache.states.num_free == 4, "reserved slots that no pass used are returned"


def test_a_model_without_recurrent_layers_has_room_for_all() -> None:
    cache = make_cache(0)
    kv = cache.new_sequence()
    assert run(cache, StepRows(kv, [1] * 9, TokenTree.chain((2,)))) == []
    assert (kv.states, cache.states.resumable(kv)) == ({}, 10)
    assert cache.states.num_free > 1 << 20 < cache.states.max_guesses()


@pytest.mark.parametrize("seed", range(20))
def test_no_slot_is_lost_and_each_call_reads_what_was_written(seed: int) -> None:
    """A model of a state: the rows it has seen. Each row's state is its parent's and itself, after any history."""
    rng, cache = random.Random(seed), make_cache(60)
    content: dict[int, tuple[int, ...]] = {INITIAL: ()}
    texts: dict[SequenceKV, list[int]] = {}
    for _ in range(40):
        for kv in rng.sample([*texts], len(texts) // 2):
            step_back(rng, cache, kv, texts)
        while len(texts) < 4:
            texts[cache.new_sequence()] = []
        batch, expected = [], []
        for kv in rng.sample([*texts], rng.randint(1, 4)):
            tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 7))]
            tree = TokenTree(
                tuple(rng.randrange(1000) for _ in range(4)), (ROOT, *(rng.randint(ROOT, n) for n in range(3)))
            )
            batch.append(StepRows(kv, tokens, tree))
            expected.append((kv, [*texts[kv], *tokens], tree))
        ids = flatten(batch).ids
        compute(content, run(cache, *batch, max_stepped=3), ids)
        for kv, text, tree in expected:
            path = rng.choice([[], [0], *[[parent, node] for node, parent in enumerate(tree.parents) if parent == 0]])
            cache.compact(kv, len(text), path)
            texts[kv] = [*text, *(tree.tokens[node] for node in path)]
            assert content[kv.states[kv.num_tokens]] == tuple(texts[kv])
        cache.check_integrity()


def step_back(rng: random.Random, cache: KVCache, kv: SequenceKV, texts: dict[SequenceKV, list[int]]) -> None:
    """Free the sequence, or go back to a shorter text, as far as a state is there."""
    if rng.random() < 0.3:
        cache.free(kv)
        del texts[kv]
        return
    cache.truncate(kv, rng.randint(0, kv.num_tokens))
    cache.truncate(kv, cache.states.resumable(kv))
    del texts[kv][kv.num_tokens :]


def compute(content: dict[int, tuple[int, ...]], calls: list[StateRows], ids: list[int]) -> None:
    for call in calls:
        if call.is_chunk:
            content[call.targets[0]] = (*content[call.sources[0]], *(ids[row] for row in call.rows))
            continue
        read = [content[source] for source in call.sources]
        for row, state, target in zip(call.rows, read, call.targets, strict=True):
            content[target] = (*state, ids[row])


HASHES = [b"one", b"two", b"three"]


def shared_cache(num_states: int = NUM_STATES) -> KVCache:
    cache = make_cache(num_states)
    cache.states.is_shared = True
    return cache


def test_a_prompt_leaves_a_state_at_the_end_of_its_last_whole_block() -> None:
    cache = shared_cache()
    kv = cache.new_sequence()
    first, second = run(cache, StepRows(kv, [1] * 10), max_stepped=4)
    assert (first.rows, second.rows) == (list(range(8)), [8, 9])
    assert (first.targets, second.sources, second.targets) == ([kv.states[8]], [kv.states[8]], [kv.states[10]])
    cache.publish(kv, HASHES[:2])
    other = cache.new_sequence()
    assert cache.adopt(other, HASHES) == 8
    assert other.states == {8: kv.states[8]}
    (call,) = run(cache, StepRows(other, [2]))
    assert call.sources == [kv.states[8]] != call.targets


def test_one_by_one_the_last_whole_block_has_a_slot_of_its_own_too() -> None:
    cache = shared_cache()
    kv = cache.new_sequence()
    calls = run(cache, StepRows(kv, [1] * 6))
    assert [call.targets for call in calls] == [[kv.states[4]]] * 4 + [[kv.states[6]]] * 2
    assert calls[4].sources == [kv.states[4]]


def test_blocks_without_a_state_are_not_adopted() -> None:
    """KV of three blocks is there; the only state is at the end of the second."""
    cache = shared_cache()
    kv = cache.new_sequence()
    run(cache, StepRows(kv, [1] * 9), max_stepped=4)
    run(cache, StepRows(kv, [1] * 2))
    run(cache, StepRows(kv, [1] * 2))
    del kv.states[12]  # as if no slot had been free
    cache.publish(kv, HASHES)
    assert cache.num_published(HASHES) == 2
    assert cache.num_published(HASHES[:1]) == 0
    assert cache.adopt(cache.new_sequence(), HASHES) == 8


def test_states_without_users_are_dropped_for_others_oldest_first() -> None:
    cache = shared_cache(6)
    for name in (b"a", b"b"):
        kv = cache.new_sequence()
        run(cache, StepRows(kv, [1] * 5))
        cache.publish(kv, [name])
        cache.free(kv)
        cache.check_integrity()
    assert cache.states.num_free == 6, "what nobody uses can be taken"
    user = cache.new_sequence()
    assert cache.adopt(user, [b"a"]) == 4
    assert cache.states.num_free == 5
    kv = cache.new_sequence()
    cache.states.reserve_all([(kv, 5)])
    cache.check_integrity()
    assert cache.num_published([b"a"]) == 1, "it is in use"
    assert cache.num_published([b"b"]) == 0


def test_states_that_were_not_published_are_kept_for_that_up_to_a_number() -> None:
    cache = shared_cache()
    kv = cache.new_sequence()
    for _ in range(12):
        run(cache, StepRows(kv, [1] * 4))
    assert sorted(kv.states) == [16, 20, 24, 28, 32, 36, 40, 44, 48]


def test_states_at_block_borders_leave_room_for_running_sequences():
    """A prompt in many parts keeps a state at each border only while more than half of the slots are free."""
    cache = make_cache(num_states=12)
    cache.states.is_shared = True
    seq = cache.new_sequence()
    for _ in range(12):
        run(cache, StepRows(seq, [1] * 7))
        assert cache.states.num_free >= 6


def test_states_before_the_last_committed_row_are_released_with_the_verdict() -> None:
    """Else accepted guesses would take states that other sequences have been promised."""
    cache = make_cache()
    kv = cache.new_sequence()
    run(cache, StepRows(kv, [1, 2], TokenTree.chain((3, 4, 5))))
    cache.compact(kv, 2, [0, 1, 2])
    cache.states.drop_early(kv, 5)
    assert {*kv.states} == {4, 5}
    assert cache.states.num_free == NUM_STATES - 2
    cache.check_integrity()


def test_sequences_that_keep_to_their_share_never_lack_a_state() -> None:
    """Whatever is accepted: each has blocks as large as its share, all in one pass."""
    cache, rng = make_cache(NUM_STATES), random.Random(1)
    kvs = [cache.new_sequence() for _ in range(4)]
    texts = dict.fromkeys(kvs, 0)
    block = TokenTree.chain((1,) * cache.states.max_guesses(len(kvs)))
    assert len(block) > 0
    for _ in range(20):
        run(cache, *(StepRows(kv, [7], block) for kv in kvs))
        for kv in kvs:
            path = range(rng.choice([0, len(block)]))
            cache.compact(kv, texts[kv] + 1, path)
            texts[kv] += 1 + len(path)
            cache.states.drop_early(kv, texts[kv])
            if not texts[kv] % 3:  # one of few blocks of KV
                cache.truncate(kv, 0)
                texts[kv] = 0
        cache.check_integrity()
