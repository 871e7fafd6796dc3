"""Each rule asks for what its name says, and no code asks which rule it is."""

import numpy as np
import pytest

from core.records import GenerationRequest, Sampling, SequenceSpec
from core.rules import GREEDY, Verification, all_rules, lossless
from core.speculation.token_tree import ROOT, SparseDistribution, TokenTree
from tests.core.rules.decoding import FIRST_TOKEN, VOCAB_SIZE, dirichlet

EVEN = SparseDistribution((0, 1, 2, 3), (0.25,) * 4)
FORK = TokenTree((1, 2), (ROOT, ROOT), (EVEN, EVEN))


def spec(verification, temperature):
    return SequenceSpec(1, Sampling(temperature=temperature), verification)


def test_a_name_is_its_rules_and_found_by_it():
    for each in Verification:
        assert (each.rule.name, each.value, each.name) == (each, each, each.value.upper())
        assert Verification[each.value.upper()] is each
    names = [rule.name for rule in all_rules()]
    assert len(set(names)) == len(names)


def test_what_is_lossless_is_greedy_at_temperature_0():
    for each in Verification:
        if each.rule.is_lossless:
            assert spec(each, 0.0).rule is GREEDY
            assert spec(each, 1.0).rule is each.rule


@pytest.mark.parametrize("verification", Verification)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_request_and_its_sequence_have_the_same_rule(verification, temperature):
    of_sequence = spec(verification, temperature)
    request = GenerationRequest("r", (1,), Sampling(temperature=temperature), 9, verification)
    assert request.rule is of_sequence.rule
    assert (of_sequence.needs_q, of_sequence.takes_trees) == (request.rule.needs_q, request.rule.takes_trees)


def test_lossless_rules_that_differ():
    """No two names share a rule, but where all are greedy decoding."""
    assert lossless(is_greedy=True) == (Verification.COUPLED,)
    assert lossless(is_greedy=False) == tuple(each for each in Verification if each.rule.is_lossless)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_a_rule_takes_trees_or_refuses_them_as_it_says(rule):
    log_p = np.full((3, 4), -np.log(4.0))
    if rule.takes_trees:
        rule.decide(FORK, log_p, 3, 5, 1.0)
    else:
        with pytest.raises(ValueError, match="chains only"):
            rule.decide(FORK, log_p, 3, 5, 1.0)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_without_guesses_every_rule_says_what_plain_decoding_says(rule):
    """One that is certain of its token: then no noise can tell them apart."""
    log_p = np.full((1, 4), -np.inf)
    log_p[0, 2] = 0.0
    path, next_token = rule.decide(TokenTree(), log_p, 3, 5, 0.5)[:2]
    assert (path, next_token) == ((), 2)


@pytest.mark.parametrize("rule", [rule for rule in all_rules() if rule.is_lossless and not rule.needs_q], ids=str)
def test_what_a_lossless_rule_by_samples_emits_depends_on_no_guess(rule):
    """Therefore a stream may be resumed and replayed from its seed (`GenerationRequest.depends_on_guesses`)."""
    generator, log_p, lengths = np.random.default_rng(5), np.log(dirichlet(1)), set()
    for seed in range(100):
        tokens = generator.integers(0, VOCAB_SIZE, 12).tolist()
        parents = [int(generator.integers(ROOT, node)) for node in range(12)]
        block = TokenTree(tuple(tokens), tuple(parents))
        path, next_token = rule.decide(block, log_p[[FIRST_TOKEN, *tokens]], seed, 5, 1.0)[:2]
        emitted = [*(tokens[node] for node in path), next_token]
        lasts = [FIRST_TOKEN, *emitted[:-1]]
        plain = [rule.decide(TokenTree(), log_p[[last]], seed, 5 + i, 1.0).next_token for i, last in enumerate(lasts)]
        assert emitted == plain
        lengths.add(len(emitted))
    assert len(lengths) > 2
