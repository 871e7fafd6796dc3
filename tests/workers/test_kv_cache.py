"""Blocks are owned once, lengths fit, and what a sequence reads is what was written to it last."""

from __future__ import annotations

import random
from itertools import count

import pytest
import torch

from workers.kv_cache import KVCache, LayerShape, OutOfBlocks, SequenceKV

SHAPES = [LayerShape(2, 3, 3), LayerShape(1, 2, 4)]


def make_cache(num_blocks: int = 12, block_tokens: int = 4) -> KVCache:
    return KVCache(SHAPES, num_blocks, block_tokens, torch.float32, torch.device("cpu"))


class Shadow:
    """A cache beside a plain list per sequence of what each row should hold: every row is filled with its own tag."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.rows: dict[SequenceKV, list[int]] = {}
        self._tags = count(1)

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
    action = rng.choices(["new", "write", "truncate", "compact", "free"], [2, 8, 3, 4, 1])[0]
    if action == "new" or not seqs:
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
    elif action == "truncate":
        shadow.truncate(seq, rng.randint(0, length))
    elif action == "compact":
        base = rng.randint(0, length)
        path = sorted(rng.sample(range(length - base), rng.randint(0, length - base)))
        shadow.compact(seq, base, path)
    else:
        shadow.free(seq)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_operations_keeps_contents_and_ownership(seed: int) -> None:
    rng = random.Random(seed)
    shadow = Shadow(make_cache())
    for _ in range(500):
        random_step(shadow, rng)
        shadow.check()
    for seq in list(shadow.rows):
        shadow.free(seq)
    assert shadow.cache.num_free_blocks == shadow.cache.num_blocks


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
    with pytest.raises(AssertionError, match="freed twice"):
        cache.free(seq)


def test_integrity_check_sees_a_block_with_two_owners() -> None:
    cache = make_cache()
    a, b = cache.new_sequence(), cache.new_sequence()
    cache.reserve(a, 4)
    b.blocks.append(a.blocks[0])
    with pytest.raises(AssertionError, match="two owners"):
        cache.check_integrity()
