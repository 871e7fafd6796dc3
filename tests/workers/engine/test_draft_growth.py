"""Trees that grow continuously in the real draft engine: it tells what a draft that remembers nothing would say."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest

from core.config import EngineConfig
from core.records import (
    DraftRequest,
    DraftUpdate,
    Missing,
    Refused,
    Sampling,
    SequenceSpec,
    Stamp,
    Verification,
    is_last,
)
from core.speculation.growth import TreeSpec
from core.speculation.speculation_tree import SpeculationTree
from core.speculation.token_tree import ROOT
from core.text.token_log import TokenLog
from tests.checkpoints import write
from tests.workers.engine.driving import EPOCH, Driver, answer_all, has_grown, wrong
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
GREEDY = Sampling(temperature=0.0)
COUPLED = Sampling(temperature=0.9, seed=3)
PENALISED = Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
CERTAIN = Sampling(temperature=0.0, logit_bias=((7, 60.0),))
"""Says one token for ever, and is sure of it."""
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, pytest.param(COUPLED, marks=pytest.mark.thorough), PENALISED])
CANDIDATES = TreeSpec(1, 1, calibration=(0.0, 0.0), tail=(0.12,) * 7, num_passes=1)
"""Those of the root."""
TREE_SPEC = TreeSpec(8, 12, 0.02, (1.0, 1.0), (0.4, 0.2, 0.1))
SHALLOW = replace(TREE_SPEC, max_depth=2, min_path_prob=0.0)
"""Growth that is over after a few passes."""


def load(checkpoint, kv_cache_tokens=4096, **settings):
    config = EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=kv_cache_tokens, **settings)
    return DraftEngine.load(config, EPOCH, 16, lambda _: None)


@pytest.fixture
def engine(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def says(checkpoint):
    """The likeliest tokens after each text, by an engine that is asked with the whole of it; all of them side by side,
    since a step costs the same for one."""
    engine, known = load(checkpoint, share_prefixes=False), {}

    def fresh(number, text, prompt_len, sampling):
        spec, stamp = SequenceSpec(prompt_len, sampling), Stamp(f"fresh {number}", EPOCH, 1)
        return DraftRequest(stamp, TokenLog(text).base(0), text, CANDIDATES, spec)

    def ranked(texts, prompt_len, sampling):
        unknown = [text for text in texts if (text, prompt_len, sampling) not in known]
        for first in range(0, len(unknown), 32):
            asked = unknown[first : first + 32]
            requests = [fresh(number, text, prompt_len, sampling) for number, text in enumerate(asked)]
            for text, reply in zip(asked, answer_all(engine, requests), strict=True):
                known[text, prompt_len, sampling] = reply.new_nodes.tokens.tolist()
            for request in requests:
                engine._store.drop(request.stamp.lease)
        return [known[text, prompt_len, sampling] for text in texts]

    return ranked


class Session:
    """An orchestrator's view of one session that is grown for: every node that it was told of, by its text."""

    def __init__(
        self, bench, name, prompt=PROMPT, sampling=GREEDY, tree_spec=TREE_SPEC, verification=Verification.COUPLED
    ):
        self.bench, self.name, self.tree_spec = bench, name, tree_spec
        self.log, self.spec = TokenLog(prompt), SequenceSpec(len(prompt), sampling, verification)
        self.held = self.round = 0
        self.roots, self.texts, self.path_prob, self.said = {}, [], [], {}
        self.ends, self.updates, self.anew = [], [], set()

    @property
    def text(self):
        return tuple(self.log.tokens)

    def tell(self, *tokens, base=None):
        """Commit these tokens, and have the draft grow below them."""
        self.log.extend(tokens)
        self.round += 1
        base = min(self.held, len(self.log) - 1) if base is None else base
        tree_spec = self.tree_spec if base else replace(self.tree_spec, reports_all=True)
        if base == 0:
            self.anew.add(self.round)
        self.roots[self.round] = self.text
        spec = None if base else self.spec
        request = DraftRequest(
            Stamp(self.name, EPOCH, self.round), self.log.base(base), self.log.since(base), tree_spec, spec=spec
        )
        self.bench.add(self, request)

    def take(self, reply):
        if is_last(reply):
            self.ends.append(reply)
            self.held = reply.held if isinstance(reply, Missing) else self.held
        if not isinstance(reply, DraftUpdate) or not self.roots:  # or somebody else asked in its name
            return
        new_nodes = reply.new_nodes
        if reply.stamp.round in self.anew:
            self.anew.remove(reply.stamp.round)
            self.texts, self.path_prob = [], []
        assert new_nodes.first == len(self.texts), "numbers go on where they were"
        columns = (new_nodes.parents, new_nodes.tokens, new_nodes.ranks, new_nodes.chances)
        for parent, token, rank, chance in zip(*(column.tolist() for column in columns), strict=True):
            above = self.roots[reply.stamp.round] if parent == ROOT else self.texts[parent]
            self.texts.append((*above, token))
            self.path_prob.append(chance * (1.0 if parent == ROOT else self.path_prob[parent]))
            self.said.setdefault(above, {})[rank] = token
        self.updates.append(reply)
        if reply.stamp.round == self.round:
            self.held = reply.held

    def check(self, says):
        """Each guess is what the draft says there of its rank."""
        assert self.said
        wanted = says(self.said, self.spec.prompt_len, self.spec.sampling)
        for (text, by_rank), want in zip(self.said.items(), wanted, strict=True):
            assert by_rank == dict(enumerate(want[: len(by_rank)])), f"after {text[self.spec.prompt_len :]}"


class Bench:
    """An engine, and who is told its replies."""

    def __init__(self, engine):
        self.engine, self.sessions, self.rows_of_steps = engine, {}, []
        forward = engine._runtime.forward

        def counted(batch):
            self.rows_of_steps.append(sum(rows.num_rows for rows in batch))
            return forward(batch)

        engine._runtime.forward = counted

    def add(self, session, request):
        self.sessions[request.stamp] = session
        self.engine.add(request)

    def step(self):
        for reply in self.engine.step():
            self.sessions[reply.stamp].take(reply)
        self.engine.check_integrity()

    def run(self, max_steps=200, *, is_to_end=True):
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        assert not is_to_end, "an engine that has nothing worth a row has no work"

    def grow(self, num_steps):
        self.run(num_steps, is_to_end=False)


@pytest.fixture
def bench(engine):
    return Bench(engine)


def walk(session, random, num_tokens):
    """Some of the tokens that were told below the text; fewer where the tree ends."""
    path, text = [], session.text
    while len(path) < num_tokens and text in session.said:
        path.append(random.choice(list(session.said[text].values())[:2]))
        text = (*text, path[-1])
    return path


@SAMPLINGS
def test_the_text_is_the_targets_and_comes_in_fewer_rounds(checkpoint, bench, sampling):
    """Blocks of the orchestrator's tree, verified by a target with the draft's weights."""
    target = TargetEngine.load(EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=4096), EPOCH, lambda _: None)
    want = Driver(target, PROMPT, sampling, session="plain").run(60)
    verifying, session, tree = (
        Driver(target, PROMPT, sampling),
        Session(bench, "s", sampling=sampling),
        SpeculationTree(),
    )
    num_rounds, got = 0, []
    while len(got) < 60:
        num_rounds += 1
        session.updates = []
        session.tell(*got[len(session.log) - len(PROMPT) :])
        bench.grow(6)
        for each in session.updates:
            tree.add(each.new_nodes, len(session.log) - len(session.roots[each.stamp.round]))
        block = tree.block(tree.best(12, 10))
        verdict = verifying.verify(block)
        tokens = [*(block.tokens[node] for node in verdict.path), verdict.next_token]
        tree.reroot(tokens)
        got += tokens
    assert got[:60] == want
    assert num_rounds < 30


@SAMPLINGS
@pytest.mark.parametrize("seed", range(3))
def test_after_many_verdicts_candidates_are_those_of_a_fresh_engine(bench, says, sampling, seed):
    """Whatever was accepted, and now and then a token that nobody had guessed (the stale-KV bug)."""
    random, session = Random(seed), Session(bench, "s", sampling=sampling)
    session.tell()
    for _ in range(10):
        bench.grow(random.randrange(6))
        path = walk(session, random, random.randrange(5))
        session.tell(*path, *([] if path and random.random() < 0.7 else [random.randrange(250)]))
    bench.run()
    session.check(says)
    assert [reply.reason for reply in session.ends] == ["the message was overtaken by a later one"] * 10


def test_what_is_below_an_accepted_path_is_kept_and_not_computed_again(bench, says):
    """Every text that the draft says something after was computed once."""
    random, session = Random(1), Session(bench, "s", sampling=COUPLED)
    session.tell()
    for _ in range(6):
        bench.grow(4)
        path = walk(session, random, 3)
        assert path, "the tree goes on"
        session.tell(*path)
    bench.run()
    assert bench.engine.stats().num_rows == len(PROMPT) - 1 + len(session.said)
    session.check(says)


def test_a_verdict_that_leads_to_fed_nodes_costs_no_row_and_is_told_of_at_once(bench):
    session = Session(bench, "s")
    session.tell()
    bench.run()
    num_rows = bench.engine.stats().num_rows
    first = session.said[session.text][0]
    session.tree_spec = replace(TREE_SPEC, min_path_prob=1.0)
    session.updates = []
    session.tell(first)
    bench.run()
    assert bench.engine.stats().num_rows == num_rows
    assert [(each.stamp.round, each.held, each.timing) for each in session.updates] == [(2, len(PROMPT) + 1, None)]


def test_a_text_that_leads_elsewhere_begins_again_and_numbers_go_on(bench, says):
    session = Session(bench, "s")
    session.tell()
    bench.run()
    num_reported = len(session.texts)
    session.tell(wrong(wrong(next(t for t in range(250) if t not in session.said[session.text].values()))), 9)
    bench.run()
    assert len(session.texts) > num_reported > 0
    assert session.text in session.said
    session.check(says)


def test_calibration_holds_for_nodes_that_are_kept_too(bench):
    """A new message's chances order the next pass, not those of the message before."""
    session = Session(bench, "s", tree_spec=replace(TREE_SPEC, calibration=(-3.0, 0.0)))
    session.tell()
    bench.grow(1)
    session.tree_spec = replace(TREE_SPEC, calibration=(8.0, 0.0), rows_per_pass=1)
    session.tell(session.said[session.text][0])
    begun = len(session.texts)
    bench.grow(4)
    assert all(text[: len(session.text)] == session.text for text in session.texts[begun:])
    deepest = max(session.said, key=len)
    assert len(deepest) >= len(session.text) + 2, "one that is sure of its first guesses goes down"


def test_sessions_share_a_pass_best_first_and_none_starves(bench, says):
    sure, unsure = Session(bench, "sure", sampling=CERTAIN), Session(bench, "unsure", [9, 8, 7, 200], COUPLED)
    for session in (sure, unsure):
        session.tree_spec = TreeSpec(1, 20, 0.01, (0.0, 1.0), (0.4, 0.2, 0.1))
        session.tell()
    bench.grow(8)
    assert len(sure.said) > len(unsure.said)
    assert bench.rows_of_steps[1:] == [1] * 7, "rows are those of a pass, over all sessions"
    bench.run()
    assert len(unsure.said) > 1
    for session in (sure, unsure):
        session.check(says)


def test_each_session_gets_its_own_candidates_in_passes_with_others(bench, says):
    random = Random(2)
    sessions = [
        Session(bench, f"{i}", [random.randrange(250) for _ in range(3 + i)], sampling)
        for i, sampling in enumerate([GREEDY, COUPLED, PENALISED, COUPLED])
    ]
    for _ in range(6):
        for session in random.sample(sessions, 2):
            session.tell(*walk(session, random, 2))
        bench.grow(3)
    bench.run()
    for session in sessions:
        if session.round:
            session.check(says)


def test_a_session_feeds_nothing_below_its_own_least_chance(bench):
    """Beside another that asks for less."""
    strict = Session(bench, "strict", sampling=COUPLED, tree_spec=replace(TREE_SPEC, min_path_prob=0.2))
    lax = Session(bench, "lax", sampling=COUPLED)
    for session in (strict, lax):
        session.tell()
    bench.run()
    path_prob = dict(zip(strict.texts, strict.path_prob, strict=True))
    assert all(path_prob[text] >= 0.2 for text in strict.said if text != strict.text)
    assert {text for text, chance in path_prob.items() if chance >= 0.2} <= strict.said.keys()
    assert len(lax.said) > len(strict.said)


@pytest.mark.parametrize(("tree_spec", "num_jobs"), [(replace(TREE_SPEC, min_path_prob=0.3), 1), (SHALLOW, 0)])
def test_an_engine_rests_when_nothing_is_worth_a_row(bench, tree_spec, num_jobs):
    """The session is still grown for, unless nothing is left to feed at all."""
    session = Session(bench, "s", tree_spec=tree_spec)
    session.tell()
    bench.run()
    assert not bench.engine.has_work
    assert max(map(len, session.texts)) <= len(PROMPT) + tree_spec.max_depth
    assert bench.engine.stats().num_jobs == num_jobs
    assert [has_grown(end) for end in session.ends] == [True] * (1 - num_jobs)
    session.tell(session.said[session.text][0])
    assert bench.engine.has_work


def test_no_node_is_fed_beyond_the_models_context(tmp_path):
    bench = Bench(load(str(write("llama", tmp_path, max_position_embeddings=16))))
    session = Session(bench, "s", sampling=CERTAIN, tree_spec=replace(TREE_SPEC, max_depth=100, min_path_prob=0.0))
    session.tell()
    bench.run()
    assert max(map(len, session.said)) == 16
    session.tell(*[7] * 10)
    bench.run()
    assert session.text in session.said
    assert not any(len(text) > 17 for text in session.texts)


# KV


def test_growth_leaves_room_and_rests_when_kv_is_full(checkpoint, says):
    bench = Bench(load(checkpoint, 64, share_prefixes=False))
    session = Session(bench, "s", sampling=COUPLED, tree_spec=replace(TREE_SPEC, min_path_prob=0.0))
    session.tell()
    bench.run()
    assert bench.engine.stats().num_free_blocks <= 1
    assert bench.engine.stats().num_preemptions == 0
    session.check(says)


def test_an_idle_draft_makes_room_for_a_prompt_and_a_prompt_goes_before_guesses(checkpoint, says):
    bench = Bench(load(checkpoint, 96, share_prefixes=False))
    session = Session(bench, "s", sampling=COUPLED, tree_spec=replace(TREE_SPEC, min_path_prob=0.0))
    session.tell()
    bench.run()
    other = Driver(bench.engine, list(range(60)), session="other")
    bench.add(session_of := Session(bench, "other"), other.draft_request(1))
    bench.step()
    assert has_grown(session_of.ends[0])
    bench.run()
    session.tell(session.said[session.text][0])
    bench.run()
    session.check(says)


@pytest.mark.parametrize("seed", range(4))
def test_sessions_that_throw_each_other_out_are_told_nothing_wrong(checkpoint, says, seed):
    """KV for two sessions and a half; who was preempted hears that it is missing, and begins anew."""
    bench, random = Bench(load(checkpoint, 40, share_prefixes=False)), Random(seed)
    sessions = [Session(bench, name, [*PROMPT, i], COUPLED) for i, name in enumerate("abcd")]
    for session in sessions:
        session.tell()
    for _ in range(40):
        bench.grow(random.randrange(4))
        session = random.choice(sessions)
        if len(session.log) < 16:
            session.tell(*walk(session, random, 2) or [random.randrange(250)])
        else:
            session.tell()
    bench.run()
    assert bench.engine.stats().num_preemptions > 0
    assert any(isinstance(end, Missing) for session in sessions for end in session.ends)
    for session in sessions:
        session.check(says)
        num_open = session.round - len(session.ends)
        assert num_open == (session.name in bench.engine._growing_jobs), "each message has one end, or is the last"


def test_a_session_that_is_preempted_while_nothing_grows_is_told_so(checkpoint):
    bench = Bench(load(checkpoint, 48, share_prefixes=False))
    session = Session(bench, "s", tree_spec=replace(TREE_SPEC, min_path_prob=1.0))
    session.tell()
    bench.run()
    assert has_grown(answer_of(bench, Driver(bench.engine, list(range(46)), session="o").draft_request(1)))
    bench.run()
    assert [type(end) for end in session.ends] == [Missing]
    session.tell()
    bench.run()
    assert session.said


def answer_of(bench, request):
    """The reply to an ordinary request beside those that grow."""
    asker = Session(bench, request.stamp.lease)
    bench.add(asker, request)
    for _ in range(100):
        if asker.ends:
            break
        bench.step()
    return asker.ends[0]


def test_prompts_are_shared_and_published_below_growing_trees(checkpoint, says):
    bench = Bench(load(checkpoint))
    prompt = [*PROMPT, *range(90)]
    sessions = [Session(bench, name, prompt, COUPLED) for name in "abc"]
    sessions[0].tell()
    bench.grow(3)
    for session in sessions[1:]:
        session.tell()
    bench.grow(8)
    assert bench.engine.stats().num_adopted_tokens == 2 * 92
    random = Random(0)
    for _ in range(4):
        for session in sessions:
            session.tell(*walk(session, random, 4))
        bench.grow(4)
    bench.run()
    for session in sessions:
        session.check(says)


def test_a_prompt_in_chunks_is_timed_by_its_passes_and_held_as_far_as_it_is(checkpoint):
    bench = Bench(load(checkpoint, max_step_tokens=64, prefill_chunk_tokens=32))
    session = Session(bench, "s", list(range(200)))
    session.tell()
    bench.grow(6)
    begun, *passes = session.updates
    assert (begun.held, begun.timing) == (0, None)
    assert [each.timing.num_passes for each in passes] == [1] * len(passes)
    assert {each.timing.num_sessions for each in passes} == {1}
    assert [each.timing.num_rows for each in passes] == bench.rows_of_steps[-len(passes) :]


@pytest.mark.thorough
def test_rows_that_found_no_room_in_a_step_wait_and_do_not_pile_up(checkpoint, says):
    bench = Bench(load(checkpoint, max_step_tokens=64))
    session = Session(bench, "s", sampling=COUPLED, tree_spec=replace(TREE_SPEC, rows_per_pass=60, min_path_prob=0.0))
    session.tell()
    bench.grow(4)
    others = [Driver(bench.engine, [i], COUPLED, session=f"{i}") for i in range(4)]
    for driver in others:
        bench.add(Session(bench, driver.session), driver.draft_request(24))
    bench.grow(40)
    assert max(bench.rows_of_steps) <= 64
    session.check(says)


# Endings


def test_release_ends_growth_once_and_frees_what_it_holds(bench):
    session = Session(bench, "s")
    session.tell()
    bench.grow(3)
    bench.engine.release(["s", "unknown"])
    bench.run()
    assert [(type(end), end.reason) for end in session.ends] == [(Refused, "the session has ended")]
    stats = bench.engine.stats()
    assert (stats.num_free_blocks, stats.num_jobs, stats.num_sessions) == (stats.num_blocks, 0, 0)
    session.tell(base=0)
    bench.run()
    assert len(session.ends) == 2, "its message came after its end"


def test_a_silent_session_expires_and_its_growth_ends(bench, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr("workers.engine.base.monotonic", lambda: now_s[0])
    session = Session(bench, "s")
    session.tell()
    bench.run()
    assert bench.engine.expire() == []
    now_s[0] += bench.engine._config.session_timeout_s + 1.0
    assert bench.engine.expire() == ["s"]
    assert bench.engine.has_work, "somebody is to be told"
    bench.run()
    assert [(type(end), end.reason) for end in session.ends] == [(Refused, "the session sent no message for too long")]
    stats = bench.engine.stats()
    assert (stats.num_free_blocks, stats.num_jobs) == (stats.num_blocks, 0)
    session.tell()
    assert isinstance(session.ends[-1], Refused)
    bench.run()
    assert isinstance(session.ends[-1], Missing)


def test_a_message_that_overtakes_ends_the_one_before_under_its_own_stamp(bench):
    session = Session(bench, "s")
    session.tell()
    bench.grow(2)
    session.tell(3)
    session.tell(4)
    bench.grow(1)
    assert [(type(end), end.stamp.round) for end in session.ends] == [(Refused, 1), (Refused, 2)]
    late = DraftRequest(Stamp("s", EPOCH, 2), session.log.base(6), session.log.since(6), TREE_SPEC)
    bench.add(session, late)
    bench.run()
    assert session.ends[2].stamp.round == 2
    assert list(bench.engine._growing_jobs) == ["s"], "a message that comes too late changes nothing"


def test_growth_that_is_over_ends_its_message_and_leaves_no_job(bench, says):
    session = Session(bench, "s", sampling=COUPLED, tree_spec=SHALLOW)
    session.tell()
    bench.run()
    assert [update.is_over for update in session.updates] == [False] * (len(session.updates) - 1) + [True]
    assert session.ends == session.updates[-1:]
    assert (bench.engine.stats().num_jobs, bench.engine.has_work) == (0, False)
    session.tell(*walk(session, Random(0), 1))
    bench.run()
    session.tell(*walk(session, Random(1), 2), 9)
    bench.run()
    assert [(has_grown(end), end.stamp.round) for end in session.ends] == [(True, 1), (True, 2), (True, 3)]
    session.check(says)
    bench.engine.release(["s"])
    assert not bench.engine.has_work, "nobody is to be told"


def test_growth_that_is_over_from_the_beginning_is_told_so_at_once(bench):
    """Everything to be fed is held."""
    session = Session(bench, "s", tree_spec=SHALLOW)
    session.tell()
    bench.run()
    num_rows, num_told = bench.engine.stats().num_rows, len(session.texts)
    session.tell()
    assert bench.engine.stats().num_jobs == 0
    bench.run()
    assert session.ends[1] is session.updates[-1]
    assert (session.ends[1].stamp.round, session.ends[1].held, session.ends[1].timing) == (2, len(PROMPT), None)
    assert (bench.engine.stats().num_rows, len(session.texts)) == (num_rows, num_told)


@pytest.mark.parametrize(("num_tokens", "is_lost"), [(38, False), (46, True)])
def test_growth_that_is_over_goes_on_after_others_have_taken_its_room(checkpoint, says, num_tokens, is_lost):
    """Its guesses alone, or all that it held: that comes to light with its next message, and no sooner."""
    bench = Bench(load(checkpoint, 48, share_prefixes=False))
    session = Session(bench, "s", sampling=COUPLED, tree_spec=SHALLOW)
    session.tell()
    bench.run()
    other = Driver(bench.engine, list(range(num_tokens)), session="other")
    assert has_grown(answer_of(bench, other.draft_request(1)))
    bench.run()
    assert len(session.ends) == 1
    assert bench.engine.stats().num_preemptions == is_lost
    first = session.said[session.text][0]
    session.said.clear()
    session.tell(first)
    bench.run()
    bench.engine.release(["other"])
    if is_lost:
        assert session.ends[1:] == [Missing(Stamp("s", EPOCH, 2), 0)]
        session.tell()
    bench.run()
    assert [has_grown(end) for end in session.ends] == [True, *[False] * is_lost, True]
    assert session.text in session.said, "all is told anew"
    session.check(says)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_scores_that_are_none_end_growth_of_that_session_alone(bench, says, steps_before):
    bad, good = Session(bench, "bad"), Session(bench, "good", [9, 8, 7])
    bad.tell()
    good.tell()
    bench.grow(steps_before)
    forward = bench.engine._runtime.forward

    def poisoned(batch):
        bench.engine._runtime.forward = forward
        logits = forward(batch).clone()
        is_first = batch[0].kv is bench.engine._store.find("bad").kv
        logits[0 if is_first else -1, 9] = math.nan
        return logits

    bench.engine._runtime.forward = poisoned
    bench.step()
    bench.run()
    assert [type(end) for end in bad.ends] == [Refused]
    assert "NaN" in bad.ends[0].reason
    assert not good.ends
    assert bench.engine.stats().num_jobs == 1
    bad.tell(*([bad.said[bad.text][0]] if bad.said else [7]))
    bench.run()
    for session in (bad, good):
        session.check(says)


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
def test_who_must_sample_is_refused(bench, verification):
    session = Session(bench, "s", sampling=COUPLED, verification=verification)
    session.tell()
    bench.run()
    assert [end.reason for end in session.ends] == [
        "a draft that samples grows a chain of a length that is fixed beforehand"
    ]
    assert bench.engine.stats().num_jobs == 0


# Growth of both kinds


@SAMPLINGS
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (2, 3))])
def test_growth_that_goes_on_and_growth_that_ends_may_alternate(bench, says, sampling, seed):
    random, session = Random(seed), Session(bench, "s", sampling=sampling)
    session.tell()
    for _ in range(12):
        bench.grow(random.randrange(5))
        tokens = walk(session, random, random.randrange(4)) or [random.randrange(250)]
        session.tree_spec = random.choice([TREE_SPEC, TreeSpec(2, 3, tail=(0.4, 0.2), num_passes=3)])
        session.tell(*tokens, base=0 if random.random() < 0.3 else None)
        if session.tree_spec.num_passes:
            bench.run()
            assert has_grown(session.ends[-1])
    session.tree_spec = TREE_SPEC
    session.tell()
    bench.run()
    session.check(says)
    assert {type(end) for end in session.ends} == {Refused, DraftUpdate}
    assert len(session.ends) == session.round - 1, "each message has one end, but for the last"


def test_numbers_begin_anew_where_the_whole_text_is_sent_again(bench, says):
    """Below nodes that the engine held: each is fed once more, and stands once in the tree."""
    session = Session(bench, "s", sampling=COUPLED)
    session.tell()
    bench.run()
    assert len(session.texts) > 8
    session.tell(base=0)
    bench.run()
    assert session.updates[-1].new_nodes.first < len(session.texts)
    tree = bench.engine._store.find("s").tree
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    session.tell(*walk(session, Random(0), 2))
    bench.run()
    session.check(says)


# Time


def test_a_pass_takes_as_long_as_from_the_one_before_it(bench, monkeypatch):
    """Work between two passes is a part of their cost; an engine's waits are not."""
    now = itertools.count()
    for module in ("workers.engine.draft", "workers.engine.draft_growth", "workers.engine.base"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: float(next(now)))
    session = Session(bench, "s", sampling=CERTAIN, tree_spec=replace(TREE_SPEC, max_depth=12, min_path_prob=0.0))
    session.tell()
    bench.grow(4)
    before = next(now)
    for _ in range(1000):  # telling takes its time
        next(now)
    bench.grow(1)
    assert 1000 < session.updates[-1].timing.computed_s < next(now) - before + 20
    bench.run()
    for _ in range(1000):  # nothing is to be done
        next(now)
    session.tell(*walk(session, Random(0), 1))
    bench.grow(1)
    assert 0 < session.updates[-1].timing.computed_s < 1000
