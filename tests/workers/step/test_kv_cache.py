"""Blocks are owned once, lengths fit, and what a sequence reads is what was written to it last."""

from __future__ import annotations

import random
from itertools import count

import pytest
import torch

from core.text.block_hash import BlockHash
from workers.step.kv_cache import KVCache, LayerShape, OutOfBlocks, SequenceKV

pytestmark = pytest.mark.thorough

SHAPES = [LayerShape(2, 3, 3), LayerShape(1, 2, 4), LayerShape(1, 5, 3, values_in_keys=True)]


def make_cache(num_blocks: int = 12, block_tokens: int = 4) -> KVCache:
    return KVCache(SHAPES, num_blocks, block_tokens, torch.float32, torch.device("cpu"))


def names(tags: list[int], block_tokens: int) -> list[BlockHash]:
    """Contents of each whole block: all tags up to its end."""
    ends = range(block_tokens, len(tags) + 1, block_tokens)
    return [",".join(map(str, tags[:end])).encode() for end in ends]


class Shadow:
    """A cache beside a plain list per sequence of what each row should hold: every row is filled with its own tag."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.rows: dict[SequenceKV, list[int]] = {}
        self.published: list[list[int]] = []
        self.num_adopted = 0
        self._tags = count(1)

    def publish(self, seq: SequenceKV, num_rows: int) -> None:
        """All whole blocks of the first `num_rows` rows."""
        tags = self.rows[seq][:num_rows]
        self.cache.publish(seq, names(tags, self.cache.block_tokens))
        self.published = [*self.published[-20:], tags]

    def adopt(self, tags: list[int]) -> SequenceKV:
        seq = self.cache.new_sequence()
        num_rows = self.cache.adopt(seq, names(tags, self.cache.block_tokens))
        self.rows[seq] = tags[:num_rows]
        self.num_adopted += num_rows
        return seq

    def new(self) -> SequenceKV:
        seq = self.cache.new_sequence()
        self.rows[seq] = []
        return seq

    def write(self, seq: SequenceKV, num_rows: int) -> None:
        """Raises: OutOfBlocks, with nothing changed."""
        self.cache.reserve(seq, seq.num_tokens + num_rows)
        for row in range(seq.num_tokens, seq.num_tokens + num_rows):
            tag = next(self._tags)
            for tensor in (*self.cache.keys, *self.cache.values):
                tensor[self.cache.slot(seq, row)] = tag
            self.rows[seq].append(tag)
        self.cache.extend(seq, num_rows)

    def truncate(self, seq: SequenceKV, length: int) -> None:
        self.cache.truncate(seq, length)
        del self.rows[seq][length:]

    def compact(self, seq: SequenceKV, base: int, path: list[int]) -> None:
        self.cache.compact(seq, base, path)
        self.rows[seq] = self.rows[seq][:base] + [self.rows[seq][base + offset] for offset in path]

    def free(self, seq: SequenceKV) -> None:
        self.cache.free(seq)
        del self.rows[seq]

    def check(self) -> None:
        self.cache.check_integrity()
        for seq, tags in self.rows.items():
            assert seq.num_tokens == len(tags)
            slots = [self.cache.slot(seq, row) for row in range(len(tags))]
            for tensor in (*self.cache.keys, *self.cache.values):
                want = torch.tensor(tags, dtype=torch.float32)[:, None, None].expand(-1, *tensor.shape[1:])
                assert torch.equal(tensor[slots], want)


def random_step(shadow: Shadow, rng: random.Random) -> None:
    seqs = list(shadow.rows)
    actions = {"new": 1, "adopt": 3, "write": 8, "publish": 4, "truncate": 2, "compact": 4, "free": 2}
    action = rng.choices(list(actions), list(actions.values()))[0]
    if len(seqs) > 5 and action in ("new", "adopt"):
        action = "free"
    if action == "adopt" and shadow.published:
        shadow.adopt(rng.choice(shadow.published))
        return
    if action in ("new", "adopt") or not seqs:
        shadow.new()
        return
    seq = rng.choice(seqs)
    length = seq.num_tokens
    if action == "write":
        num_rows = rng.randint(1, 9)
        held, free = list(seq.blocks), shadow.cache.num_free_blocks
        try:
            shadow.write(seq, num_rows)
        except OutOfBlocks:
            assert (seq.blocks, seq.num_tokens, shadow.cache.num_free_blocks) == (held, length, free)
    elif action == "publish":
        shadow.publish(seq, rng.randint(0, length))
    elif action == "truncate":
        shadow.truncate(seq, max(0, length - rng.randint(0, 6)))
    elif action == "compact":
        base = rng.randint(first_guess(shadow, seq), length)
        path = sorted(rng.sample(range(length - base), rng.randint(0, length - base)))
        shadow.compact(seq, base, path)
    else:
        shadow.free(seq)


def first_guess(shadow: Shadow, seq: SequenceKV) -> int:
    """The first row behind everything that others may read."""
    published = [place for place, block in enumerate(seq.blocks) if block in shadow.cache._pool._hash_of]
    return min(seq.num_tokens, (published[-1] + 1) * shadow.cache.block_tokens) if published else 0


def run_random_steps(seed: int, num_steps: int) -> None:
    rng = random.Random(seed)
    shadow = Shadow(make_cache())
    for _ in range(num_steps):
        random_step(shadow, rng)
        shadow.check()
    assert shadow.num_adopted > num_steps / 20
    for seq in list(shadow.rows):
        shadow.free(seq)
    assert shadow.cache.num_free_blocks == shadow.cache.num_blocks


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_operations_keeps_contents_and_ownership(seed: int) -> None:
    run_random_steps(seed, 1500)


@pytest.mark.slow
def test_nothing_leaks_over_100_000_operations() -> None:
    run_random_steps(4, 100_000)


def test_the_shadow_notices_a_row_that_was_not_moved() -> None:
    shadow = Shadow(make_cache())
    seq = shadow.new()
    shadow.write(seq, 6)
    shadow.cache.truncate(seq, 4)  # what a forgotten compaction would leave: rows 0..3 instead of 0, 1, 3, 5
    shadow.rows[seq] = [shadow.rows[seq][row] for row in (0, 1, 3, 5)]
    with pytest.raises(AssertionError):
        shadow.check()


def test_room_is_reserved_for_all_sequences_or_for_none() -> None:
    cache = make_cache(num_blocks=3)
    a, b = cache.new_sequence(), cache.new_sequence()
    with pytest.raises(OutOfBlocks, match="4 KV blocks needed, 3 free"):
        cache.reserve_all([(a, 8), (b, 8)])
    assert (a.blocks, b.blocks, cache.num_free_blocks) == ([], [], 3)
    cache.reserve_all([(a, 8), (b, 4)])
    assert cache.num_free_blocks == 0


def test_truncate_frees_whole_blocks_only() -> None:
    cache = make_cache(num_blocks=3)
    seq = cache.new_sequence()
    cache.reserve(seq, 12)
    cache.extend(seq, 12)
    cache.truncate(seq, 5)
    assert len(seq.blocks) == 2
    assert cache.num_free_blocks == 1


def test_a_sequence_that_grows_alone_lies_in_one_piece() -> None:
    cache = make_cache(num_blocks=8)
    seq = cache.new_sequence()
    for length in range(1, 30):
        cache.reserve(seq, length)
    assert seq.blocks == list(range(seq.blocks[0], seq.blocks[0] + 8))


def test_a_block_is_handed_on_without_what_was_in_it() -> None:
    cache = make_cache(num_blocks=1)
    first = cache.new_sequence()
    cache.reserve(first, 4)
    cache.keys[0][cache.slot(first, 2)] = torch.nan
    cache.free(first)
    second = cache.new_sequence()
    cache.reserve(second, 1)
    assert all(torch.isfinite(tensor).all() for tensor in (*cache.keys, *cache.values))


def test_a_sequence_finds_again_what_it_has_left_unless_that_may_be_nan() -> None:
    cache = make_cache(num_blocks=2)
    seq, block = cache.new_sequence(), slice(3 * 4, 4 * 4)
    for may_hold_nan, found in ((False, 1.0), (True, 0.0)):
        cache.reserve(seq, 8)
        cache.extend(seq, 8 - seq.num_tokens)
        assert seq.blocks == [2, 3]
        cache.keys[0][block] = 1.0
        cache.truncate(seq, 3)
        if may_hold_nan:
            cache.mark_nan(seq)
        cache.reserve(seq, 5)
        assert (cache.keys[0][block] == found).all()


def without_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_blocks_that_cannot_be_erased_are_given_back_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(num_blocks=2)
    first, second = cache.new_sequence(), cache.new_sequence()
    cache.reserve(first, 8)
    cache.keys[0][cache.slot(first, 2)] = torch.nan
    cache.free(first)
    with monkeypatch.context() as failing:
        failing.setattr(cache, "erase", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reserve(second, 8)
    assert (second.blocks, cache.num_free_blocks) == ([], 2)
    cache.check_integrity()
    cache.reserve(second, 8)
    assert all(torch.isfinite(tensor).all() for tensor in (*cache.keys, *cache.values))


@pytest.mark.parametrize("fails", ["erase", "move"])
def test_what_is_shared_stays_so_where_it_cannot_be_copied(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    a, hashes = published(cache, 8)
    b = cache.new_sequence()
    cache.adopt(b, hashes)
    cache.truncate(b, 6)
    with monkeypatch.context() as failing:
        failing.setattr(cache, fails, without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reserve(b, 13)
    assert b.blocks == a.blocks
    assert cache.num_free_blocks == 12 - 2
    cache.check_integrity()
    cache.reserve(b, 13)
    cache.check_integrity()


def test_misuse_is_caught() -> None:
    cache = make_cache()
    seq = cache.new_sequence()
    cache.reserve(seq, 4)
    with pytest.raises(AssertionError, match="beyond the block table"):
        cache.extend(seq, 5)
    cache.extend(seq, 4)
    with pytest.raises(AssertionError, match="cannot truncate"):
        cache.truncate(seq, 5)
    with pytest.raises(AssertionError, match="down the tree"):
        cache.compact(seq, 0, [2, 1])
    with pytest.raises(AssertionError, match="within the rows"):
        cache.compact(seq, 2, [0, 2])
    cache.free(seq)
    with pytest.raises(AssertionError, match="was freed"):
        cache.free(seq)


def test_integrity_check_sees_a_block_with_two_owners() -> None:
    cache = make_cache()
    a, b = cache.new_sequence(), cache.new_sequence()
    cache.reserve(a, 4)
    b.blocks.append(a.blocks[0])
    with pytest.raises(AssertionError, match="users are miscounted"):
        cache.check_integrity()
    cache._pool._num_users[a.blocks[0]] += 1
    with pytest.raises(AssertionError, match="two owners"):
        cache.check_integrity()


def published(cache: KVCache, num_rows: int, name: str = "a") -> tuple[SequenceKV, list[BlockHash]]:
    """A sequence of `num_rows` rows, whose whole blocks others may adopt, and their hashes."""
    seq = cache.new_sequence()
    cache.reserve(seq, num_rows)
    cache.extend(seq, num_rows)
    hashes = [f"{name}{place}".encode() for place in range(num_rows // cache.block_tokens)]
    cache.publish(seq, hashes)
    return seq, hashes


def test_a_beginning_is_shared_and_the_first_row_that_differs_has_a_block_of_its_own() -> None:
    cache = make_cache()
    a, hashes = published(cache, 8)
    b = cache.new_sequence()
    assert cache.adopt(b, [*hashes, b"unknown"]) == 8
    cache.reserve(b, 9)
    assert b.blocks[:2] == a.blocks
    assert cache.num_free_blocks == 12 - 3
    cache.check_integrity()


def test_who_writes_into_what_others_read_gets_a_copy_of_what_is_still_valid() -> None:
    cache = make_cache()
    a, hashes = published(cache, 8)
    cache.keys[0][cache.slot(a, 4) : cache.slot(a, 7) + 1] = torch.arange(1.0, 5.0)[:, None, None]
    b = cache.new_sequence()
    cache.adopt(b, hashes)
    cache.truncate(b, 6)
    cache.reserve(b, 7)
    assert b.blocks[0] == a.blocks[0]
    assert b.blocks[1] != a.blocks[1]
    assert cache.keys[0][cache.slot(b, 4) : cache.slot(b, 7) + 1, 0, 0].tolist() == [1.0, 2.0, 0.0, 0.0]
    cache.extend(b, 1)
    cache.check_integrity()


def test_what_its_only_user_overwrites_is_published_no_longer() -> None:
    cache = make_cache()
    a, hashes = published(cache, 8)
    cache.truncate(a, 7)
    assert cache.num_published(hashes) == 2, "nothing was written yet"
    cache.reserve(a, 8)
    assert cache.num_published(hashes) == 1
    cache.check_integrity()


def test_rows_that_others_may_read_are_not_counted_as_written() -> None:
    cache = make_cache()
    a, _ = published(cache, 8)
    cache.truncate(a, 7)
    with pytest.raises(AssertionError, match="others may read"):
        cache.extend(a, 1)


def test_room_is_not_there_where_a_copy_needs_the_last_block() -> None:
    cache = make_cache(num_blocks=2)
    a, hashes = published(cache, 4)
    b, c = cache.new_sequence(), cache.new_sequence()
    cache.adopt(b, hashes)
    cache.reserve(c, 4)
    cache.truncate(b, 3)
    with pytest.raises(OutOfBlocks, match="1 KV blocks needed, 0 free"):
        cache.reserve(b, 4)
    assert (b.blocks, b.num_tokens, cache.num_published(hashes)) == (a.blocks, 3, 1)
    cache.free(a)
    cache.reserve(b, 4)
    assert cache.num_published(hashes) == 0, "nobody else reads it any more"


def test_what_a_new_sequence_adopts_costs_it_nothing_unless_it_was_free() -> None:
    cache = make_cache(num_blocks=5)
    seq, hashes = published(cache, 12)
    assert [cache.has_room(hashes, num_tokens) for num_tokens in (20, 21)] == [True, False], "two more than are shared"
    assert [cache.has_room([], num_tokens) for num_tokens in (8, 9)] == [True, False]
    cache.free(seq)
    assert [cache.has_room(hashes, num_tokens) for num_tokens in (20, 21)] == [True, False], "all are free now"
    cache.adopt(other := cache.new_sequence(), hashes)
    cache.reserve(other, 20)
    assert [cache.has_room(hashes, num_tokens) for num_tokens in (12, 13)] == [True, False]


def test_what_nobody_uses_is_kept_until_the_room_is_needed_and_ends_go_before_beginnings() -> None:
    cache = make_cache(num_blocks=4)
    a, hashes_a = published(cache, 8)
    b, hashes_b = published(cache, 8, "b")
    cache.free(b)
    cache.free(a)
    assert cache.num_free_blocks == 4
    again = cache.new_sequence()
    assert cache.adopt(again, hashes_b) == 8, "used after its end"
    cache.free(again)
    new = cache.new_sequence()
    cache.reserve(new, 4)
    assert [cache.num_published(hashes) for hashes in (hashes_a, hashes_b)] == [1, 2]
    cache.reserve(new, 12)
    assert [cache.num_published(hashes) for hashes in (hashes_a, hashes_b)] == [0, 1]
    cache.check_integrity()


def test_the_same_content_is_published_once() -> None:
    cache = make_cache()
    a, hashes = published(cache, 4)
    b, _ = published(cache, 4)
    cache.free(a)
    assert cache.num_published(hashes) == 1
    cache.free(b)
    assert (cache.num_published(hashes), cache.num_free_blocks) == (1, 12)
    cache.check_integrity()


def test_a_copy_has_nothing_in_it_but_the_valid_rows() -> None:
    cache = make_cache()
    a, hashes = published(cache, 4)
    for block in range(max(a.blocks) + 1, 14):
        cache.keys[0][4 * block : 4 * block + 4] = torch.nan
    b = cache.new_sequence()
    cache.adopt(b, hashes)
    cache.truncate(b, 3)
    cache.reserve(b, 4)
    assert b.blocks != a.blocks
    assert torch.isfinite(cache.keys[0][cache.slot(b, 0) : cache.slot(b, 3) + 1]).all()
