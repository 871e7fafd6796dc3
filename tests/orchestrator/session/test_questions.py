"""Questions in a block: merged with its guesses, answered in their order, and no guesses in the statistics."""

from __future__ import annotations

from core.records import Stamp, Verdict, Want
from core.speculation.growth import UNRANKED
from core.speculation.guesser import NO_GUESSES, Guesses
from core.speculation.token_tree import ROOT, TokenTree
from orchestrator.guessers.breaker import Breaker
from orchestrator.guessers.panel import Panel
from orchestrator.policy.policy import Found, Shape
from orchestrator.policy.shared_estimates import ASKING_TRIAL_ROUNDS, QuestionValue
from orchestrator.session.sourced_block import SourcedBlock
from orchestrator.session.verdicts import JudgedBlock
from tests.orchestrator.fakes import next_token, plain, request
from tests.orchestrator.world import World

BLOCK = TokenTree((7, 8, 9), (ROOT, 0, ROOT))
SOURCED = SourcedBlock(BLOCK, Shape(BLOCK.parents, (0, 0, 1), (0.9, 0.8, 0.1)), ("draft", "draft", "a"))
WINDOW = TokenTree((9, 8, 7, 5, 9), (ROOT, 0, ROOT, 2, ROOT))
"""Its first and third node are guesses already, and the last is the first once more."""


def test_what_is_guessed_already_is_the_same_node():
    asking = SOURCED.asking("a", WINDOW)
    assert asking.tree == TokenTree((7, 8, 9, 8, 5), (ROOT, 0, ROOT, 2, 0))
    assert asking.questions.rows == (0, 3, 4, 1, 5, 3)
    assert (asking.questions.source, asking.questions.num_added) == ("a", 2)
    assert asking.shape == Shape((ROOT, 0, ROOT, 2, 0), (0, 0, 1, UNRANKED, UNRANKED), (0.9, 0.8, 0.1, 0.0, 0.0))
    assert asking.sources == ("draft", "draft", "a", "a", "a")


def test_a_question_counts_as_a_guess_where_it_is_accepted():
    asking = SOURCED.asking("a", WINDOW)
    assert asking.credits((2, 3)) == (["draft", "draft", "a", "a"], ["a", "a"])
    assert asking.credits(()) == (["draft", "draft", "a"], [])
    assert SOURCED.credits((0,)) == (["draft", "draft", "a"], ["draft"])
    verdict = Verdict(Stamp("s", 1, 1), (0, 4), 3, 1)
    assert JudgedBlock(asking, verdict, 0.0, 0.1, None, False).outcome(Found.NOT_ASKED).gained == 1
    assert JudgedBlock(SOURCED, verdict, 0.0, 0.1, None, False).outcome(Found.NOT_ASKED).gained is None


class Curious:
    """Asks about two tokens in a row."""

    def __init__(self):
        self.answers = []

    def propose(self, text):
        del text
        return Guesses.chain([11], [1.0]) if self.answers else NO_GUESSES

    def questions(self, text):
        self.text = list(text)
        return TokenTree.chain([21, 22])

    def answered(self, samples):
        assert list(samples) == [next_token([*self.text, *path]) for path in ((), (21,), (21, 22))]
        self.answers.append(samples)


def test_a_session_asks_and_hands_on_the_answers_and_the_output_is_plain(tokenizer, monkeypatch):
    world = World(request(max_tokens=20, guessers=("ngram",)), tokenizer)
    curious, session = Curious(), world.session
    session._panel = Panel({"curious": curious}, {"curious": Breaker("curious")}, session._policy.sources, 50)
    asked = []
    verify = type(world.target).verify

    def answer(self, message):
        asked.append(message)
        verdict = verify(self, message)
        if not message.wants or not isinstance(verdict, Verdict):
            return verdict
        tokens, paths = [*session.tokens], [()]
        for token, parent in zip(message.block.tokens, message.block.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        samples = tuple(next_token([*tokens, *path]) for path in paths)
        return Verdict(verdict.stamp, verdict.path, verdict.next_token, verdict.held, samples=samples)

    monkeypatch.setattr(type(world.target), "verify", answer)
    world.start().run()
    assert world.tokens == plain((3, 1, 4), 20)
    wanting = [message for message in asked if message.wants]
    assert len(curious.answers) == len(wanting) > 10
    assert {message.wants for message in asked} == {(), (Want.SAMPLES,)}
    stats = world.chunks[-1].stats
    assert stats.num_drafted_tokens < len(wanting) * 2, "questions are no guesses"
    assert not session._panel.failures


def test_asking_goes_on_while_it_pays_and_is_tried_again_for_a_small_share_of_the_tokens():
    answers = QuestionValue()
    while answers.are_worth_asking(0.5):
        answers.observe(0)
    assert 4 < answers.tokens.num_seen < 20
    waited = 1
    while not answers.are_worth_asking(0.5):
        waited += 1
    assert 0.021 * waited >= ASKING_TRIAL_ROUNDS * 0.5
    for _ in range(ASKING_TRIAL_ROUNDS):
        assert answers.are_worth_asking(0.5)
        answers.observe(2)
    assert answers.are_worth_asking(0.5), "the trial has paid"
