"""The worth of one session's guesses decides the requests of the next session, if both verify alike."""

from __future__ import annotations

import pytest

from core.config import SpeculationConfig
from core.records import Sampling, Verification, VerifyRequest
from core.speculation import PRIOR, Guesses
from orchestrator.guessers import Breaker, Panel
from orchestrator.policy.policies import Controller
from tests.orchestrator.fakes import FakeTokenizer, plain, request
from tests.orchestrator.world import World

PROMPT, NUM_TOKENS = (3, 1, 4), 24
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=1.0)


class Sage:
    """Right, and as sure of it as the other."""

    def propose(self, text):
        return Guesses.chain(self.tokens(text), (0.5, 0.5))

    def tokens(self, text):
        return plain(text, 2)


class Liar(Sage):
    """Never right."""

    def tokens(self, text):
        return [1 + token % 49 for token in plain(text, 2)]


def served(policies, job=None, **guessers):
    """A session of an orchestrator with these guessers, at its end."""
    world = World(job or request(PROMPT, NUM_TOKENS), FakeTokenizer(), with_draft=False, policies=policies)
    breakers = {name: Breaker(name) for name in guessers}
    world.session._panel = Panel(guessers, breakers, world.policy.sources, 50)
    return world.start().run()


def first_block(world):
    """The first block with guesses."""
    blocks = [each.block for each in world.sent if isinstance(each, VerifyRequest)]
    return next(block for block in blocks if len(block))


@pytest.fixture(params=["static_tree", "adaptive"])
def policies(request):
    return Controller(SpeculationConfig(policy=request.param, max_block_tokens=2))


def test_a_session_takes_the_nodes_of_the_source_that_was_right_in_another(policies):
    """Both claim as much: at first each has a node of the block, then the one that is right has all."""
    right = plain(PROMPT, 3)[1:]
    taught = served(policies, liar=Liar(), sage=Sage())
    assert first_block(taught).parents == (-1, -1)
    assert first_block(taught).tokens != tuple(right)
    follower = served(policies, liar=Liar(), sage=Sage())
    assert (first_block(follower).tokens, first_block(follower).parents) == (tuple(right), (-1, 0))
    assert taught.tokens == follower.tokens == plain(PROMPT, NUM_TOKENS)


def test_what_has_always_been_wrong_is_not_taken_before_what_is_not_known(policies):
    served(policies, liar=Liar())
    follower = served(policies, liar=Liar(), sage=Sage())
    assert first_block(follower).tokens == tuple(plain(PROMPT, 3)[1:])


@pytest.mark.parametrize(
    ("sampling", "verification"),
    [(WARM, Verification.COUPLED), (WARM, Verification.REJECTION), (WARM, Verification.BLOCK)],
)
def test_requests_that_verify_in_other_ways_learn_apart(policies, sampling, verification):
    served(policies, liar=Liar(), sage=Sage())
    other = policies.policy(request(PROMPT, NUM_TOKENS, sampling=sampling, verification=verification)).sources
    greedy = policies.policy(request(PROMPT, NUM_TOKENS, sampling=GREEDY)).sources
    for source in ("liar", "sage"):
        assert other.of(source).num_seen == 0
        assert other.of(source).factor == PRIOR
    assert greedy.of("sage").factor > PRIOR > greedy.of("liar").factor


def test_greedy_requests_learn_together_whatever_they_are_verified_by(policies):
    """At temperature 0 all rules are the same."""
    served(policies, liar=Liar())
    rejection = request(PROMPT, NUM_TOKENS, sampling=GREEDY, verification=Verification.REJECTION)
    assert policies.policy(rejection).sources.of("liar").num_seen > 0
