"""The window by hand, the pool within its bounds, and a text that a target goes on with as its n-grams say."""

from __future__ import annotations

from random import Random

from core.speculation.guesser import QuestioningGuesser
from core.speculation.token_tree import ROOT, TokenTree
from orchestrator.guessers.lookahead import MAX_CONTINUATIONS, MAX_FIRST_TOKENS, Lookahead, NgramPool


def test_a_window_of_three_columns_by_hand():
    """W = 3, N = 4: two rounds fill it, and the third makes the first n-grams. Answers are letters in the comments."""
    guesser = Lookahead(8, window=3, ngram=4)
    assert isinstance(guesser, QuestioningGuesser)
    text = [1, 2, 3, 4, 5]
    assert guesser.questions(text) == TokenTree.chain([2, 3, 4, 5])  # W + N - 3 tokens that the text ends in
    guesser.answered([10, 11, 12, 13, 14])
    text.append(10)
    # level 0: 3 4 5 in columns 1 to 3; level 1: 11 12 13 14 in columns 0 to 3
    assert guesser.questions(text) == TokenTree((3, 4, 5, 11, 12, 13, 14), (ROOT, 0, 1, ROOT, 0, 1, 2))
    guesser.answered([0, 0, 0, 0, 20, 21, 22, 23])
    text.append(20)
    # level 0: 4 5; level 1: 12 13 14; level 2: 21 22 23
    window = TokenTree((4, 5, 12, 13, 14, 21, 22, 23), (ROOT, 0, ROOT, 0, 1, 2, 3, 4))
    assert guesser.questions(text) == window
    assert not guesser.propose(text).tokens, "nothing has been found yet"
    guesser.answered([0, 0, 0, 0, 0, 0, 30, 31, 32])
    # n-grams: 20 12 21 30, 4 13 22 31, 5 14 23 32; level 1 becomes the chain, the answers the last level
    for first, rest in ((20, (12, 21, 30)), (4, (13, 22, 31)), (5, (14, 23, 32))):
        found = guesser.propose([*text, first])
        assert (found.tokens, found.parents) == (rest, (ROOT, 0, 1))
    text += [12, 9]
    assert guesser.questions(text) == TokenTree((13, 14, 21, 22, 23, 30, 31, 32), (ROOT, 0, ROOT, 0, 1, 2, 3, 4))


def test_a_text_shorter_than_the_window_is_filled_up_with_its_last_token():
    assert Lookahead(8, window=4, ngram=5).questions([7, 8]).tokens == (7, 8, 8, 8, 8, 8)


def test_guesses_are_no_deeper_than_is_of_use():
    guesser = Lookahead(2, window=2, ngram=6)
    for _ in range(9):
        guesser.answered([3] * (1 + len(guesser.questions([3]))))
    assert guesser.propose([3]).tokens == (3, 3)


def test_the_latest_continuation_goes_first_and_the_oldest_of_too_many_is_forgotten():
    pool = NgramPool()
    for number in range(MAX_CONTINUATIONS + 2):
        pool.add(1, (number, 5))
    pool.add(1, (4, 5))
    assert [rest[0] for rest in pool.after(1)] == [4, 9, 8, 7, 6, 5, 3, 2]


def test_the_pool_is_bounded_whatever_comes():
    pool, dice = NgramPool(), Random(0)
    for _ in range(20_000):
        pool.add(dice.randrange(4_000), (dice.randrange(4_000), 1))
    assert len(pool) <= MAX_FIRST_TOKENS * MAX_CONTINUATIONS
    assert len(pool._by_first) == MAX_FIRST_TOKENS
    pool.add(-1, (2, 3))
    pool.after(-1)
    for number in range(MAX_FIRST_TOKENS - 1):
        pool.add(10_000 + number, (1, 1))
    assert pool.after(-1) == [(2, 3)], "what was asked for last is kept longest"


def test_a_target_with_a_law_of_its_own_is_foreseen():
    """Its next token is a function of the last two: so n-grams out of its answers are right."""

    def target(tokens):
        return (3 * tokens[-1] + tokens[-2]) % 7

    guesser, text, num_rounds = Lookahead(4, window=6, ngram=5), [1, 2, 3], 0
    while len(text) < 103:
        guesses, tree = guesser.propose(text), guesser.questions(text)
        paths = [list(text)]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append([*paths[parent + 1], token])
        committed, place = [], ROOT
        while True:
            token = target([*text, *committed])
            committed.append(token)
            children = [n for n, parent in enumerate(guesses.parents) if parent == place and guesses.tokens[n] == token]
            if not children:
                break
            place = children[0]
        guesser.answered([target(path) for path in paths])
        text += committed
        num_rounds += 1
    assert num_rounds < 40
