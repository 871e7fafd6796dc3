"""A grammar's state is a function of the output's tokens, whatever was asked before and whatever was rejected."""

import random

import pytest
from grammars import EOS, PERSON, allowed, at_once, following, ids, lark, regex, schema, state
from llguidance import LLParserLimits

import workers.grammar.compiler
from workers.grammar.compiler import GrammarProblem
from workers.grammar.state import GrammarState

MOST_STATES = 158
"""Limit of the library's lexer: enough for any one output, and not for many."""

GRAMMARS = {
    "schema": schema(PERSON),
    "any object": schema({"type": "object"}),
    "regex": regex(r"(ab|a[0-9]{2,5}|x+y){1,6}z?"),
    "lark": lark(
        'start: item ("," item)*\nitem: /[a-z]+/ "=" (NUMBER | start_)\nstart_: "(" start ")"\nNUMBER: /[0-9]+/'
    ),
}


def walk(grammar, rng, num_tokens, output=()):
    """An output that the grammar allows, without its end; ids of few characters so that it is long."""
    output, current = list(output), state(grammar)
    for _ in range(num_tokens):
        (mask,) = current.masks(output, [()])
        choices = [token for token in allowed(mask) if token != EOS]
        if not choices:
            break
        output.append(rng.choice(choices[:40]))
    return output


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_a_new_state_whatever_was_asked_before(name, seed):
    """Outputs that grow, shrink and change, with trees below them whose branches part and are rejected."""
    grammar, rng = GRAMMARS[name], random.Random(seed)
    outputs = [walk(grammar, rng, 12) for _ in range(3)]
    current = state(grammar)
    for _ in range(12):
        whole = rng.choice(outputs)
        output = whole[: rng.randrange(len(whole) + 1)]
        paths = [()]
        for _ in range(6):
            stem = rng.choice(paths)
            known = following(grammar, [*output, *stem]) or [5]
            guess = rng.choice([token for token in known if token != EOS] or [5]) if rng.random() < 0.8 else 5
            paths.append((*stem, guess))
        rng.shuffle(paths)
        for path, mask in zip(paths, current.masks(output, paths), strict=True):
            alone = state(grammar)
            (expected,) = alone.masks(output, [path])
            assert (mask is None) == (expected is None)
            if mask is not None:
                assert mask.tobytes() == expected.tobytes()


def test_a_nodes_mask_is_that_of_its_own_path_and_not_of_its_siblings():
    grammar = regex("(ax|by)(1|2)")
    a, b, x, y = (ids(text)[0] for text in "abxy")
    after_a, after_b, after_ax, after_by = state(grammar).masks([], [(a,), (b,), (a, x), (b, y)])
    assert x in allowed(after_a)
    assert y not in allowed(after_a)
    assert y in allowed(after_b)
    assert allowed(after_ax) == allowed(after_by) == sorted(ids("1") + ids("2"))


def test_below_a_guess_that_is_forbidden_or_ends_the_output_nothing_is_said_and_its_siblings_are_as_ever():
    grammar = regex("(ab)+")
    a, b = ids("a")[0], ids("b")[0]
    output = ids("ab")
    paths = [(), (b,), (b, a), (EOS,), (EOS, a), (a,), (a, b), (a, a)]
    masks = state(grammar).masks(output, paths)
    assert [path for path, mask in zip(paths, masks, strict=True) if mask is None] == [
        (b,),
        (b, a),
        (EOS,),
        (EOS, a),
        (a, a),
    ]
    for path, mask in zip(paths, masks, strict=True):
        if mask is not None:
            assert allowed(mask) == following(grammar, [*output, *path])


def test_the_end_may_come_only_after_a_whole_word_and_must_where_nothing_else_may():
    grammar = regex("ab?c{2}")
    assert EOS not in following(grammar, [])
    assert EOS not in following(grammar, ids("a"))
    assert following(grammar, [ids("a")[0], ids("c")[0], ids("c")[0]]) == [EOS]
    assert EOS in following(regex("a+"), ids("a"))
    assert following(regex("a+"), [*ids("a"), EOS]) is None


@pytest.mark.parametrize(
    "grammar", [lark('start: "a" X\nX: /b/ & /c/'), lark('start: "a" <[0]> "b"')], ids=["a dead end", "named by its id"]
)
def test_the_end_does_not_come_in_the_middle_whatever_the_grammar_says(grammar):
    current = state(grammar)
    (mask,) = current.masks(ids("a"), [()])
    assert allowed(mask) == []
    assert current.problem == "no output that begins so satisfies it"


def test_an_output_that_the_grammar_forbids_is_followed_by_nothing():
    current = state(regex("abc"))
    for output in (ids("x"), [*ids("a"), EOS], [*ids("abc"), *ids("d")]):
        masks = current.masks(output, [(), tuple(ids("a"))])
        assert [allowed(mask) for mask in masks] == [[], []]
        assert current.problem == "it forbids what the output already has"
    (mask,) = current.masks([], [()])
    assert allowed(mask) == following(regex("abc"), [])


def test_after_its_end_an_output_is_masked_no_more():
    assert state(regex("abc")).masks([*ids("abc"), EOS], [(), (5,)]) == [None, None]


class Failing:
    """A library's state that runs into a limit after so many tokens, as one with a large automaton."""

    def __init__(self, matcher, limit, counts, consumed=()):
        self.matcher, self.limit, self.counts, self.consumed = matcher, limit, counts, list(consumed)

    def deep_copy(self):
        self.counts["copies"] += 1
        return Failing(self.matcher.deep_copy(), self.limit, self.counts, self.consumed)

    def try_consume_tokens(self, tokens):
        num_taken = self.matcher.try_consume_tokens(tokens)
        self.consumed += tokens[:num_taken]
        return num_taken

    def rollback(self, num_tokens):
        del self.consumed[len(self.consumed) - num_tokens :]
        return self.matcher.rollback(num_tokens)

    def is_error(self):
        return len(self.consumed) > self.limit

    def get_error(self):
        return "too many states\nof the lexer"

    def compute_bitmask(self):
        return self.matcher.compute_bitmask()

    def is_accepting(self):
        return self.matcher.is_accepting()


def failing_state(limits):
    """A state whose first compilation fails after the first of the limits, the next after the second, and so on."""
    grammar, counts, made = regex("(ab)+"), {"copies": 0, "compiled": 0}, []

    def compile_it():
        future = at_once(grammar)
        compiled = future.result()
        compiled.start = Failing(compiled.start, limits[min(len(made), len(limits) - 1)], counts)
        made.append(compiled)
        counts["compiled"] += 1
        return future

    return GrammarState(grammar, compile_it, 4096), counts


def test_a_limit_that_a_guess_runs_into_masks_the_guess_and_not_the_output():
    """Without guesses the sequence may never come there; it is judged again without."""
    current, _ = failing_state([3])
    a, b = ids("a")[0], ids("b")[0]
    root, after_a, after_ab = current.masks([a, b], [(), (a,), (a, b)])
    assert allowed(root) == following(regex("(ab)+"), [a, b])
    assert allowed(after_a) == following(regex("(ab)+"), [a, b, a])
    assert allowed(after_ab) == []
    assert current.problem == "too many states"


def test_a_limit_that_is_full_of_other_sequences_is_met_with_a_new_compilation():
    current, counts = failing_state([1, 100])
    a, b = ids("a")[0], ids("b")[0]
    (mask,) = current.masks([a, b, a], [()])
    assert allowed(mask) == following(regex("(ab)+"), [a, b, a])
    assert counts["compiled"] == 2
    assert current.problem is None


def test_a_limit_at_which_the_library_takes_a_token_as_little_without_an_error_is_noticed(monkeypatch):
    """The state shared by a grammar's outputs grows with each of them, until llguidance takes less than the grammar
    allows and says nothing: an output was refused for what it had, and a guess that was right counted as forbidden.
    """
    grammar, rng = GRAMMARS["schema"], random.Random(21)
    outputs = [walk(grammar, rng, 60) for _ in range(12)]
    expected = [following(grammar, output) for output in outputs]
    monkeypatch.setattr(workers.grammar.compiler, "LIMITS", LLParserLimits(max_lexer_states=MOST_STATES))
    shared = []

    def compile_it():
        if not shared or shared[-1].result().is_exhausted:
            shared.append(at_once(grammar))
        return shared[-1]

    for output, following_it in zip(outputs, expected, strict=True):
        current = GrammarState(grammar, compile_it, 4096)
        (mask,) = current.masks(output, [()])
        assert current.problem is None
        assert allowed(mask) == following_it
        for num in range(len(output)):
            (mask,) = GrammarState(grammar, compile_it, 4096).masks(output[:num], [output[num : num + 1]])
            assert mask is not None
    assert len(shared) > 1


def test_a_limit_that_the_output_runs_into_by_itself_ends_it_by_name():
    current, counts = failing_state([1])
    a, b = ids("a")[0], ids("b")[0]
    masks = current.masks([a, b], [(), (a,)])
    assert [allowed(mask) for mask in masks] == [[], []]
    assert current.problem == "too many states"
    assert counts["compiled"] == 2


def test_a_grammar_that_does_not_compile_allows_nothing_and_says_why():
    current = state(regex("(a"))
    assert current.is_ready
    (mask,) = current.masks([], [()])
    assert allowed(mask) == []
    assert "unclosed group" in current.problem or "invalid regex" in current.problem


def test_a_compiled_grammar_says_which_outputs_may_begin_so():
    compiled = at_once(schema(PERSON)).result()
    assert compiled.allows(ids('{"name": "x", "age": 3'))
    assert not compiled.allows(ids('{"name": "x", "age": 331'))
    assert issubclass(GrammarProblem, ValueError)
    assert workers.grammar.compiler.LIMITS.max_lexer_states == 20_000


def test_an_expression_that_explodes_is_stopped_by_name():
    """It compiles, since what it costs comes with the text."""
    current, output = state(regex("(((a{0,500}){0,500}){0,500}){0,500}")), []
    while current.problem is None and len(output) < 200:
        (mask,) = current.masks(output, [()])
        output.append(next((token for token in allowed(mask) if token != EOS), EOS))
    assert current.problem is not None
    assert "too many expressions" in current.problem


def test_a_grammar_with_many_readings_ends_its_output_before_its_masks_take_long():
    """Each of its words has a number of readings that grows with its length; the library counts what they take."""
    output = ids("abc" * 60)
    current = state(lark('start: s\ns: s s s | s s | "a" | "b" | "c"\n'))
    for length in range(len(output)):
        (mask,) = current.masks(output[:length], [()])
        if current.problem is not None:
            break
        assert output[length] in allowed(mask)
    assert 20 < length < 120
    assert "Too many items" in current.problem
    assert not mask.any()
