"""Engines with grammars: who waits for a compilation waits alone, and state follows the log, not what was guessed."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from core.config import EngineConfig
from core.records import DraftUpdate, Grammar, GrammarKind, Refused, Sampling, Verdict, Verification
from core.speculation.growth import TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK, SparseDistribution, TokenTree
from tests.workers.engine.driving import EPOCH, Driver, answer, step
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.grammar.compiler import GrammarCompiler

DEMO = Path(__file__).parents[3] / "models" / "demo"
PROMPT = [376, 221, 257, 300]
WORDS = Grammar(GrammarKind.REGEX, "(ab|ac[0-9]{1,3}|x+y){2,9}")
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=1.3, seed=5)]
NUM_SEEDS = 10


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(str(DEMO / "target"), kv_cache_tokens=4096, deterministic=True)
    return TargetEngine.load(config, EPOCH, lambda _: None)


def driver(engine, session, sampling=SAMPLINGS[0], grammar=WORDS):
    driver = Driver(engine, PROMPT, sampling, session=session)
    object.__setattr__(driver.spec, "grammar", grammar)
    return driver


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_verdicts_are_those_of_plain_decoding_whatever_was_guessed(engine, sampling):
    """Right guesses beside wrong ones, forbidden ones and their children; each rolled back before the next round."""
    plain = driver(engine, f"plain {sampling}", sampling).run(14)
    words = plain[: plain.index(0)] if 0 in plain else plain
    assert len(words) >= 8, "an output worth testing"
    assert GrammarCompiler.of_model(DEMO / "target", 4096, (0,)).compile(WORDS).allows(words)
    ours = driver(engine, f"guessed {sampling}", sampling)
    num_done, round_ = 0, 0
    while num_done < len(plain) - 4:
        right = plain[num_done : num_done + 1 + round_ % 3]
        wrong, forbidden = (right[0] + 1) % 4096, 5
        tokens = (wrong, right[0], forbidden, forbidden, *right[1:])
        parents = (-1, -1, 1, 2, *range(1, 2), *range(4, 2 + len(right)))[: len(tokens)]
        verdict = ours.verify(TokenTree(tokens, parents))
        emitted = [*(tokens[node] for node in verdict.path), verdict.next_token]
        assert emitted == plain[num_done : num_done + len(emitted)]
        assert len(verdict.path) >= len(right)
        num_done, round_ = num_done + len(emitted), round_ + 1
    engine.release([f"plain {sampling}", f"guessed {sampling}"])


def test_a_session_that_comes_back_with_its_whole_text_stands_where_it_stood(engine):
    """After a failover, or when its KV was taken from it: the state is made of the tokens."""
    plain = driver(engine, "whole").run(10)
    ours = driver(engine, "moved")
    for token in ours.run(5):
        assert token in plain
    back = driver(engine, "moved to")
    back.log.extend(plain[:5])
    assert back.run(5) == plain[5:]
    engine.release(["whole", "moved", "moved to"])


def test_who_waits_for_a_grammar_holds_up_nobody_else(engine, monkeypatch):
    may_go_on, compile_it = threading.Event(), GrammarCompiler.compile

    def slowly(self, grammar):
        assert may_go_on.wait(30)
        return compile_it(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", slowly)
    waiting = driver(engine, "waiting", grammar=Grammar(GrammarKind.REGEX, "[ab]{3}"))
    engine.add(waiting.verify_request())
    free = Driver(engine, PROMPT, session="free")
    free.run(4)
    may_go_on.set()
    reply = None
    while reply is None:
        reply = step(engine).get("waiting")
    assert isinstance(reply, Verdict)
    engine.release(["waiting", "free"])


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar(GrammarKind.REGEX, "(a"), "unclosed group"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'), "Unimplemented keys"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_for_good_and_others_go_on(engine, grammar, problem):
    refused = answer(engine, driver(engine, f"bad {problem}", grammar=grammar).verify_request())
    assert isinstance(refused, Refused)
    assert refused.is_final
    assert problem in refused.reason
    assert refused.field == "structured_output"
    assert len(driver(engine, f"good {problem}").run(3)) == 3
    engine.release([f"bad {problem}", f"good {problem}"])


def test_a_text_that_the_grammar_forbids_is_refused(engine):
    ours = driver(engine, "forbidden")
    ours.log.extend([5])
    refused = answer(engine, ours.verify_request())
    assert isinstance(refused, Refused)
    assert "forbids what the output already has" in refused.reason
    engine.release(["forbidden"])


def test_a_draft_guesses_what_the_grammar_allows_and_draws_from_no_other():
    config = EngineConfig(str(DEMO / "draft"), kv_cache_tokens=4096, deterministic=True)
    draft = DraftEngine.load(config, EPOCH, 64, lambda _: None)
    grammar = Grammar(GrammarKind.REGEX, "[ab]{8}")
    ours = driver(draft, "drafted", SAMPLINGS[1], grammar)
    draft.add(ours.draft_request(TreeSpec(rows_per_pass=8, max_depth=5, tail=(0.3, 0.2))))
    updates = []
    for _ in range(200):
        updates += [reply for reply in draft.step() if isinstance(reply, DraftUpdate)]
        if sum(len(update.new_nodes.tokens) for update in updates) >= 12:
            break
    compiled = GrammarCompiler.of_model(DEMO / "draft", 4096, (0,)).compile(grammar)
    tokens = np.concatenate([update.new_nodes.tokens for update in updates]).tolist()
    assert len(tokens) >= 12
    assert all(compiled.allows([token]) for token in tokens)
    drawn = driver(draft, "drawn", SAMPLINGS[1], grammar)
    object.__setattr__(drawn.spec, "verification", Verification.REJECTION)
    draft.release(["drafted"])
    block = drawn.draft(4)
    assert compiled.allows(block.tokens)
    assert all(
        compiled.allows([*block.tokens[:depth], token]) for depth, q in enumerate(block.q) for token in q.token_ids
    )


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_each_token_is_masked_by_all_that_stands_before_it(engine, sampling):
    """No two places of this text let the same characters come."""
    places = Grammar(GrammarKind.REGEX, "[0-4]{2}[a-c]{2}[5-9]{2}[d-f]{2}[+*]{2}[g-i]{2}")
    tokens = driver(engine, f"places {sampling}", sampling, places).run(13)
    text = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")).decode(tokens[: tokens.index(0)])
    assert re.fullmatch(places.text, text)
    engine.release([f"places {sampling}"])


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
@pytest.mark.parametrize("num_guesses", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_guess_after_which_nothing_can_come_is_judged_like_any_other(engine, verification, num_guesses):
    """A block that was dropped for it would make such guesses rarer than the target has them."""
    x, z, y = 88, 90, 89
    sampling = {"temperature": 1.0, "bad_words": ((y,), (1476,)), "logit_bias": ((x, 2.0), (z, 2.0))}
    first = {False: [], True: []}
    for seed in range(NUM_SEEDS):
        for has_stood in (False, True):
            ours = driver(
                engine,
                f"{verification} {num_guesses} {seed} {has_stood}",
                Sampling(**sampling, seed=seed),
                Grammar(GrammarKind.REGEX, "xy|z{3}"),
            )
            object.__setattr__(ours.spec, "verification", verification)
            block = EMPTY_BLOCK
            if has_stood:  # q is far below p: such a guess always stands
                q = SparseDistribution((x, 5), (0.1, 0.9))
                block = TokenTree((x,) * num_guesses, tuple(range(-1, num_guesses - 1)), (q,) * num_guesses)
            verdict = answer(engine, ours.verify_request(block))
            first[has_stood].append((verdict.path, verdict.next_token))
            engine.release([ours.session])
    engine.check_integrity()
    assert first[True] == [((), x)] * NUM_SEEDS
    assert {token for _, token in first[False]} == {x, z}
