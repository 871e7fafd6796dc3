"""A draft that samples grows a tree of draws of a shape that is fixed before, and tells all draws of each place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from core.config import EngineConfig
from core.exact.sampling import draw_several
from core.noise import row_of
from core.records import Refused, Sampling, Verification
from core.speculation.growth import TreeSpec
from core.speculation.token_tree import ROOT, TokenTree
from deploy.link.trees import decode_distributions, encode_distributions
from tests.checkpoints import VOCAB_SIZE
from tests.workers.engine.driving import EPOCH, Driver, answer, has_grown, tree_of
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.sampling import sampler

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLED = Sampling(temperature=0.9, seed=3)
PENALISED = Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
TREES = (Verification.RECURSIVE_REJECTION, Verification.SEQUENTIAL_SELECTION)
WAYS = pytest.mark.parametrize("way", [(sampling, rule) for sampling in (SAMPLED, PENALISED) for rule in TREES])
TREE = TreeSpec(4, 3, calibration=(0.5, 0.0), tail=(0.5, 0.3), num_passes=3, fanout=3)


@pytest.fixture(scope="module")
def load(checkpoint):
    def load(q_top_tokens=16):
        config = EngineConfig(checkpoint, block_tokens=4, deterministic=True)
        return DraftEngine.load(config, EPOCH, q_top_tokens, lambda _: None)

    return load


@pytest.fixture(scope="module")
def target(checkpoint):
    return TargetEngine.load(EngineConfig(checkpoint, block_tokens=4, deterministic=True), EPOCH, lambda _: None)


@pytest.fixture(scope="module")
def engine(load):
    return load()


def drawn_at(tree):
    """The law of each place, which its children share."""
    found = {}
    for parent, q in zip(tree.parents, tree.q, strict=True):
        assert found.setdefault(parent, q) is q
    return found


@WAYS
def test_each_place_has_the_draws_of_the_reference_and_noise_of_its_own(engine, way):
    """A node's number is its place in the tree, one up: the root's is 0."""
    driver = Driver(engine, PROMPT, *way, session=f"reference {way}")
    tree = tree_of(driver.ask(TREE))
    depths, laws = tree.depths, drawn_at(tree)
    assert len(laws) == 1 + 3 + 4, "the root, its children, and four places of the next pass"
    for place, q in laws.items():
        depth = depths[place] if place != ROOT else 0
        row = row_of(depth, 3 * (place + 1))
        draws = draw_several(
            q, VOCAB_SIZE, way[0].seed, len(PROMPT) + depth, row, 3, with_replacement=way[1].rule.with_replacement
        )
        assert q.draws == draws
        children = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == place]
        assert children == list(dict.fromkeys(draws))
    assert len({q.draws for q in laws.values()}) > 1


@pytest.mark.parametrize("verification", TREES)
def test_the_shape_does_not_depend_on_what_is_drawn(engine, verification):
    """Where no token can come twice, at least: a token that has come twice has one node."""
    shapes = set()
    for seed in range(5):
        driver = Driver(engine, PROMPT, replace(SAMPLED, seed=seed), verification, session=f"{verification} {seed}")
        tree = tree_of(driver.ask(TREE))
        shapes.add(tree.parents)
        assert {len(q.draws) for q in tree.q} == {3}
    assert len(shapes) == 1 or verification is Verification.SEQUENTIAL_SELECTION


@pytest.mark.parametrize("verification", TREES)
def test_a_target_with_the_drafts_weights_accepts_all_the_way_down(target, load, verification, monkeypatch):
    """q is p: so the first draw of each place passes, round after round."""
    monkeypatch.setattr(sampler, "Q_MASS", math.inf)
    drafting, verifying = (
        Driver(each, PROMPT, SAMPLED, verification, session=f"same {verification}")
        for each in (load(q_top_tokens=VOCAB_SIZE), target)
    )
    for _ in range(4):
        block = tree_of(drafting.ask(replace(TREE, reports_all=True)))
        verdict = verifying.verify(block)
        assert len(verdict.path) >= 3 or block.depths[verdict.path[-1]] == len(verdict.path)
        first = {parent: node for node, parent in reversed(list(enumerate(block.parents)))}
        for parent, node in zip((ROOT, *verdict.path), verdict.path, strict=False):
            assert node == first[parent]
        assert len(verdict.path) > 0
        assert (verdict.path[-1]) not in first, "down to where nothing was drawn"
        drafting.log.extend(verifying.log.since(len(drafting.log)))


@pytest.mark.parametrize("verification", TREES)
def test_growth_that_looks_at_the_draft_is_refused(engine, verification):
    driver = Driver(engine, PROMPT, SAMPLED, verification, session=f"chosen {verification}")
    for growth in (
        replace(TREE, calibration=(0.5, 1.0)),
        replace(TREE, min_path_prob=0.01),
        replace(TREE, min_confidence=0.1),
        replace(TREE, tail=(0.3, 0.5)),
        replace(TREE, num_passes=0),
    ):
        reply = answer(engine, driver.draft_request(growth))
        assert isinstance(reply, Refused)
        assert "fixed beforehand" in reply.reason
    assert has_grown(answer(engine, driver.draft_request(TREE)))


def test_rejection_draws_no_trees(engine):
    driver = Driver(engine, PROMPT, SAMPLED, Verification.REJECTION, session="chains alone")
    assert isinstance(answer(engine, driver.draft_request(TREE)), Refused)


@pytest.mark.parametrize("verification", TREES)
def test_what_was_drawn_before_nan_is_told_all_the_same(load, verification):
    engine = load()
    driver = Driver(engine, PROMPT, SAMPLED, verification)
    whole = tree_of(driver.ask(TREE))
    forward, num_passes = engine._runtime.forward, []

    def poisoned(batch):
        logits = forward(batch).clone()
        num_passes.append(len(logits))
        if len(num_passes) == 3:  # the prompt's, and one more, are sound
            logits[1:] = math.nan
        return logits

    engine._runtime.forward = poisoned
    told = tree_of(Driver(engine, PROMPT, SAMPLED, verification, session="poisoned").ask(TREE))
    engine._runtime.forward = forward
    assert 0 < len(told) < len(whole)
    assert told == whole.prefix(len(told))
    engine.check_integrity()


@pytest.mark.parametrize("verification", TREES)
def test_where_masks_leave_nothing_the_draw_before_ends_the_block(target, load, verification, monkeypatch):
    """It passes, or it does not; it is never dropped, and nothing is drawn behind it."""
    drafting, verifying = (
        Driver(each, PROMPT, SAMPLED, verification, session=f"masked {verification}")
        for each in (load(q_top_tokens=VOCAB_SIZE), target)
    )
    block = tree_of(drafting.ask(TREE))
    words = tuple((block.tokens[0], token) for token in range(VOCAB_SIZE))
    verifying.spec = replace(verifying.spec, sampling=replace(SAMPLED, bad_words=words))
    verdict = verifying.verify(block)
    assert verdict.path == ()
    assert verdict.next_token == block.tokens[0]


@pytest.mark.parametrize("verification", TREES)
def test_draws_travel_with_each_law_once(engine, verification):
    tree = tree_of(Driver(engine, PROMPT, SAMPLED, verification, session=f"wire {verification}").ask(TREE))
    message = encode_distributions(tree.q)
    assert decode_distributions(message) == tree.q
    assert len(message.lengths) == len(drawn_at(tree)) < len(tree)
    for broken in ({"of_nodes": [len(message.lengths)]}, {"draw_lengths": [1]}, {"draws": [1]}):
        worse = type(message)()
        worse.CopyFrom(message)
        for name, values in broken.items():
            worse.ClearField(name)
            getattr(worse, name).extend(values)
        with pytest.raises(ValueError, match="do not match"):
            decode_distributions(worse)


@pytest.mark.parametrize("verification", TREES)
def test_a_greedy_draft_draws_nothing(engine, verification):
    greedy = Driver(engine, PROMPT, Sampling(temperature=0.0), verification, session=f"greedy {verification}")
    tree = tree_of(greedy.ask(TREE))
    assert tree.q == TokenTree().q
    assert len(tree) > 3
