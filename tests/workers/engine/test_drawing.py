"""A draft that samples grows a chain of its draws for one block, and tells of each what it was drawn from."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from core.config import EngineConfig
from core.exact.sampling import draw_guess
from core.records import Refused, Sampling, Verification
from core.speculation.growth import Measure, TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK, ROOT
from tests.checkpoints import VOCAB_SIZE
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, has_grown, tree_of, wrong
from workers.engine import draft as draft_module
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.sampling import sampler

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLED = Sampling(temperature=0.9, seed=3)
PENALISED = Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
DRAWN = (Verification.REJECTION, Verification.BLOCK)
WAYS = pytest.mark.parametrize("way", [(sampling, rule) for sampling in (SAMPLED, PENALISED) for rule in DRAWN])
Q_TOP_TOKENS = 16


@pytest.fixture(scope="module")
def load(checkpoint):
    """Rows whose bits do not depend on their company: so equal means equal."""

    def load(q_top_tokens=Q_TOP_TOKENS, **settings):
        config = EngineConfig(checkpoint, block_tokens=4, deterministic=True, **settings)
        return DraftEngine.load(config, EPOCH, q_top_tokens, lambda _: None)

    return load


@pytest.fixture(scope="module")
def fresh(load):
    """Draws of a draft that begins with this text and remembers nothing."""
    engine = load(share_prefixes=False)

    def fresh(driver, growth):
        asker = Driver(engine, driver.log.tokens, driver.spec.sampling, driver.spec.verification, session="fresh")
        asker.spec = driver.spec
        drawn = asker.ask(growth)
        engine._store.drop("fresh")
        return drawn.new_nodes

    return fresh


@pytest.fixture
def engine(load):
    return load()


@pytest.fixture
def said(monkeypatch):
    """All candidates that the sampler has handed to the engine, in order."""
    handed, propose = [], draft_module.propose

    def noting(*args):
        found = propose(*args)

        def noted():
            candidates = found()
            handed.extend(candidates)
            return candidates

        return noted

    monkeypatch.setattr(draft_module, "propose", noting)
    return handed


@WAYS
def test_what_is_told_is_what_was_drawn_from_to_the_bit(engine, said, way):
    """Never q computed again: the fourth trap of docs/exactness.md, section 4."""
    new_nodes = Driver(engine, PROMPT, *way).ask(5).new_nodes
    assert new_nodes.q == tuple(each.q for each in said)
    assert new_nodes.tokens.tolist() == [each.sampled for each in said]
    assert new_nodes.parents.tolist() == [ROOT, 0, 1, 2, 3]
    for place, (token, q) in enumerate(zip(new_nodes.tokens.tolist(), new_nodes.q, strict=True)):
        assert token == draw_guess(q, VOCAB_SIZE, way[0].seed, len(PROMPT) + place, place)
        assert len(q.token_ids) <= Q_TOP_TOKENS
        assert sum(q.probs) == pytest.approx(1, abs=1e-5)


@WAYS
def test_in_company_the_same_is_drawn(engine, fresh, way):
    drivers = [Driver(engine, [place, *PROMPT], *way, session=f"{place}") for place in range(4)]
    replies = answer_all(engine, [driver.draft_request(5) for driver in drivers])
    for driver, reply in zip(drivers, replies, strict=True):
        assert tree_of(reply).is_chain
        want = fresh(driver, 5)
        assert (reply.new_nodes.q, reply.new_nodes.tokens.tolist()) == (want.q, want.tokens.tolist())


@pytest.mark.parametrize(
    ("num_accepted", "with_correction"),
    [
        each
        if each in [(0, True), (2, False), (2, True), (5, False)]
        else pytest.param(*each, marks=pytest.mark.thorough)
        for each in itertools.product(range(6), (False, True))
    ],
)
@pytest.mark.parametrize("way", [(SAMPLED, Verification.REJECTION), (PENALISED, Verification.BLOCK)])
def test_after_a_verdict_draws_begin_anew_at_its_root(engine, fresh, way, num_accepted, with_correction):
    """A text that ends at, or leads along, what was fed: nothing that was drawn at another row is used again, and
    nothing of what was rejected is left in the KV."""
    driver = Driver(engine, PROMPT, *way)
    for _ in range(2):
        block = driver.draft(5)
        driver.log.extend(block.tokens[:num_accepted])
        if with_correction:
            driver.log.extend([wrong(block.tokens[min(num_accepted, 4)])])
        reply = driver.ask(5)
        want = fresh(driver, 5)
        assert reply.new_nodes == want
        for place, (token, q) in enumerate(zip(want.tokens.tolist(), want.q, strict=True)):
            assert token == draw_guess(q, VOCAB_SIZE, way[0].seed, len(driver.log) + place, place)


@WAYS
def test_the_same_place_is_drawn_with_other_noise_at_another_row(engine, way):
    """Else what was drawn before a verdict would come again after it: then the test above would hold by itself."""
    driver = Driver(engine, PROMPT, *way)
    block = driver.draft(12)
    driver.log.extend(block.tokens[:1])
    assert driver.draft(11).tokens != block.tokens[1:]


@pytest.mark.parametrize("verification", DRAWN)
def test_a_target_with_the_drafts_weights_accepts_all_that_is_drawn(checkpoint, load, verification, monkeypatch):
    """q is p, where q has as many tokens as p: so no guess of any block may be rejected, round after round."""
    monkeypatch.setattr(sampler, "Q_MASS", math.inf)
    engine = load(q_top_tokens=VOCAB_SIZE)
    target = TargetEngine.load(EngineConfig(checkpoint, block_tokens=4, deterministic=True), EPOCH, lambda _: None)
    drafting, verifying = (Driver(each, PROMPT, SAMPLED, verification) for each in (engine, target))
    for _ in range(12):
        block = drafting.draft(5)
        verdict = verifying.verify(block)
        assert verdict.path == tuple(range(5))
        drafting.log.extend(verifying.log.since(len(drafting.log)))
        assert verifying.log.tokens == drafting.log.tokens


@pytest.mark.parametrize("measure", Measure)
def test_a_chain_is_as_long_as_was_asked_however_unsure_the_draft_is(engine, measure):
    """It tells by the measure that is asked for, and the session cuts the block by that."""
    sampling = replace(SAMPLED, temperature=0.5)
    for seed in range(6):
        session = f"{measure} {seed}"
        driver = Driver(engine, PROMPT, replace(sampling, seed=seed), Verification.BLOCK, session=session)
        new_nodes = driver.ask(TreeSpec.chain(8, measure)).new_nodes
        assert len(new_nodes) == 8
        if measure is not Measure.ENTROPY:
            assert new_nodes.confidences.tolist() == pytest.approx([max(q.probs) for q in new_nodes.q], rel=1e-4)


@pytest.mark.parametrize("verification", DRAWN)
def test_what_was_drawn_before_nan_is_told_all_the_same(engine, verification):
    """The row that is bad comes after a draw, and may be bad because of it: to drop the draw would make it rarer."""
    driver = Driver(engine, PROMPT, SAMPLED, verification)
    whole = driver.ask(4).new_nodes
    forward, num_rows = engine._runtime.forward, []

    def poisoned(batch):
        logits = forward(batch).clone()
        num_rows.append(len(logits))
        if len(num_rows) == 3:  # the row after the second draw
            logits[:] = math.nan
        return logits

    engine._runtime.forward = poisoned
    driver = Driver(engine, PROMPT, SAMPLED, verification, session="poisoned")
    reply = driver.ask(4)
    engine._runtime.forward = forward
    assert has_grown(reply)
    assert (reply.new_nodes.q, reply.new_nodes.tokens.tolist()) == (whole.q[:2], whole.tokens[:2].tolist())
    engine.check_integrity()
    driver.log.extend(whole.tokens[:1].tolist())
    assert len(driver.ask(4).new_nodes) == 4, "the next block is drawn as ever"


def test_where_nothing_can_be_drawn_the_draft_refuses(engine):
    forward = engine._runtime.forward
    engine._runtime.forward = lambda batch: forward(batch) * math.nan
    assert isinstance(answer(engine, Driver(engine, PROMPT, SAMPLED, DRAWN[0]).draft_request(4)), Refused)
    engine._runtime.forward = forward


@WAYS
@pytest.mark.parametrize("has_begun", [False, True])
def test_growth_without_an_end_is_refused_where_a_draft_samples(engine, way, has_begun):
    driver = Driver(engine, PROMPT, *way)
    if has_begun:
        driver.draft(2)
        driver.log.extend([9])
    reply = answer(engine, driver.draft_request(replace(TreeSpec.chain(5), num_passes=0)))
    assert isinstance(reply, Refused)
    assert "fixed beforehand" in reply.reason
    assert has_grown(answer(engine, driver.draft_request(5))), "it harms nobody"


@pytest.mark.parametrize("verification", DRAWN)
def test_a_greedy_draft_draws_nothing(engine, verification):
    assert Driver(engine, PROMPT, Sampling(temperature=0.0), verification).draft(3).q == EMPTY_BLOCK.q


@WAYS
def test_a_change_of_the_rule_forgets_what_was_drawn(engine, fresh, way):
    """From coupled to drawn and back: what was guessed by the other rule is not taken for a draw, nor a draw for it."""
    driver = Driver(engine, PROMPT, way[0])
    coupled = driver.draft(4)
    specs = [Driver(engine, PROMPT, *spec).spec for spec in (way, way[:1])]
    for spec in specs:
        driver.spec, driver.held = spec, 0
        assert driver.ask(replace(TreeSpec.chain(4), reports_all=True)).new_nodes == fresh(driver, 4)
    assert driver.draft(4) == coupled
