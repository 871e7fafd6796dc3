"""Our lookahead against its authors' algorithm: the same window, pool and passes where both do the same, the same
tokens always, and what each named difference (docs/adr/guessers) costs or gains in passes."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from core.reference import decode
from core.speculation.token_tree import ROOT
from orchestrator.guessers.lookahead import MAX_CONTINUATIONS, Lookahead
from tests.orchestrator.guessers.lookahead_reference import Reference

NUM_TOKENS = 160
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
SHAPES = [(10, 5), (5, 4), (10, 3), (7, 7), (15, 5), (2, 3)]


def hashed(order, vocab_size, seed):
    """The next token is a hash of the last `order` tokens: it goes round in a circle that `order` makes longer."""

    @cache
    def next_token(last):
        return Random(repr((seed, [*last]))).randrange(vocab_size)

    return lambda tokens: next_token(tuple(tokens[-order:]))


def mixed(vocab_size, seed):
    """Mostly by the last token, and at every few places by the last three, so that texts repeat with changes."""
    one, three = hashed(1, vocab_size, seed), hashed(3, vocab_size, seed)
    return lambda tokens: three(tokens) if sum(tokens[-3:]) % 4 == 0 else one(tokens)


MODELS = {
    **{f"order {order} of {size}": hashed(order, size, 1) for order, size in ((1, 60), (2, 12), (2, 30), (3, 6))},
    **{f"mixed {seed}": mixed(40, seed) for seed in range(4)},
}


def plainly(model, num_tokens):
    """The prompt and what the model alone writes after it."""
    prompt = tuple(PROMPT)
    return prompt + decode(model, prompt, num_tokens - len(prompt))


def tail_of(prompt, window, ngram):
    """Our first window: the end of the text, filled up with its last token."""
    num = window + ngram - 3
    return (prompt[-num:] + [prompt[-1]] * num)[:num]


class Ours:
    """Our guesser, and a target that verifies its tree as a session has it done."""

    def __init__(self, model, prompt, window, ngram, takes_questions):
        self._model, self.text, self.num_passes = model, list(prompt), 0
        self.guesser = Lookahead(ngram - 1, window=window, ngram=ngram)
        self._takes_questions = takes_questions

    def step(self):
        """`takes_questions`: whether the text may go on with a node of the window, as ours does and theirs does not."""
        model, text = self._model, self.text
        guesses, tree = self.guesser.propose(text), self.guesser.questions(text)
        paths = [text]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append([*paths[parent + 1], token])
        added = max(self._walk(guesses), self._walk(tree) if self._takes_questions else [], key=len)
        self.guesser.answered([model(path) for path in paths])
        self.text = [*text, *added]
        self.num_passes += 1
        return added

    def _walk(self, tree):
        added, place = [], ROOT
        while place is not None:
            token = self._model([*self.text, *added])
            added.append(token)
            children = [node for node, parent in enumerate(tree.parents) if parent == place]
            place = next((node for node in children if tree.tokens[node] == token), None)
        return added


def theirs(model, prompt, window, ngram, first):
    return Reference(model, list(prompt), window, ngram, MAX_CONTINUATIONS, [first])


def run(decoder):
    while len(decoder.text) < len(PROMPT) + NUM_TOKENS:
        decoder.step()
    return decoder


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_pass_by_pass_window_pool_and_tokens_are_those_of_the_authors(name, shape):
    """From one first window, and where only n-grams are accepted."""
    model = MODELS[name]
    reference = theirs(model, PROMPT, *shape, tail_of(PROMPT, *shape))
    ours = Ours(model, PROMPT, *shape, takes_questions=False)
    while len(ours.text) < len(PROMPT) + NUM_TOKENS:
        assert ours.step() == reference.step()
        assert ours.guesser._levels == reference.levels
        assert {first: found for first in reference.pool if (found := ours.guesser._pool.after(first)[::-1])} == (
            reference.pool
        )
    assert tuple(ours.text) == plainly(model, len(ours.text))
    assert len(ours.text) - len(PROMPT) > ours.num_passes or shape == (2, 3), "and something was guessed"


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_decoding_in_either_way(name):
    model = MODELS[name]
    for shape in SHAPES:
        dice = Random(2)
        drawn = [dice.choice(PROMPT) for _ in range(sum(shape) - 3)]
        for decoder in (theirs(model, PROMPT, *shape, drawn), Ours(model, PROMPT, *shape, takes_questions=True)):
            text = run(decoder).text
            assert tuple(text) == plainly(model, len(text))


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_each_difference_saves_passes(shape):
    """Over all models. In the order of the decision: a first window of what the text ends in, where theirs draws tokens
    of the prompt; and nodes of the window that may be accepted, too."""
    found = passes(shape)
    assert found["ours"] <= found["our first window"] <= found["theirs"] < len(MODELS) * NUM_TOKENS / 2


def passes(shape):
    """Passes of all models: theirs as it is, with our first window, and ours as it is."""
    total = {"theirs": 0.0, "our first window": 0, "ours": 0}
    num_draws = 4
    for model in MODELS.values():
        for seed in range(num_draws):
            dice = Random(seed)
            drawn = [dice.choice(PROMPT) for _ in range(sum(shape) - 3)]
            total["theirs"] += run(theirs(model, PROMPT, *shape, drawn)).num_passes / num_draws
        total["our first window"] += run(theirs(model, PROMPT, *shape, tail_of(PROMPT, *shape))).num_passes
        total["ours"] += run(Ours(model, PROMPT, *shape, takes_questions=True)).num_passes
    return total
