"""Over a million tokens each guesser of the text holds as much as its bounds say, and no more."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from orchestrator.guessers import ngram, prompt_lookup
from orchestrator.guessers.lookahead import MAX_CONTINUATIONS, MAX_FIRST_TOKENS, NgramPool
from orchestrator.guessers.ngram import NgramTables
from orchestrator.guessers.prompt_lookup import PromptLookup

NUM_TOKENS, VOCAB_SIZE = 10**6, 1000

pytestmark = pytest.mark.ci


def growing() -> Iterator[list[int]]:
    """A text as it grows, in pieces that are new or that came before."""
    dice, text = random.Random(7), list[int]()
    while len(text) < NUM_TOKENS:
        if len(text) > 100 and dice.random() < 0.5:
            start = dice.randrange(max(0, len(text) - 5000), len(text) - 40)
            text += text[start : start + dice.randrange(1, 40)]
        else:
            text += [dice.randrange(VOCAB_SIZE) for _ in range(dice.randrange(1, 10))]
        yield text


def test_ngram_tables_hold_what_is_in_their_window():
    tables = NgramTables(4)
    for text in growing():
        tables.propose(text).check(vocab_size=VOCAB_SIZE)
        assert len(tables._tables) <= len(ngram.CONTEXTS) * ngram.WINDOW_TOKENS
    assert sum(sum(counts.values()) for counts in tables._tables.values()) <= len(ngram.CONTEXTS) * ngram.WINDOW_TOKENS
    assert tables._end == len(text)


def test_prompt_lookup_holds_the_places_of_its_end():
    lookup = PromptLookup(4, min_match=2, max_match=4)
    for text in growing():
        lookup.propose(text).check(vocab_size=VOCAB_SIZE)
        assert len(lookup._ends) <= 3 * prompt_lookup.MAX_INDEXED_TOKENS
    assert all(len(ends) <= prompt_lookup.MAX_OCCURRENCES for ends in lookup._ends.values())


def test_the_pool_of_lookahead_holds_a_number_of_first_tokens():
    pool, dice = NgramPool(), random.Random(0)
    for _ in range(NUM_TOKENS // 2):
        pool.add(dice.randrange(20_000), (dice.randrange(VOCAB_SIZE), 1))
        assert len(pool._by_first) <= MAX_FIRST_TOKENS
    assert len(pool) <= MAX_FIRST_TOKENS * MAX_CONTINUATIONS
