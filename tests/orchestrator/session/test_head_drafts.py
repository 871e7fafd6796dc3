"""A session whose draft is a head: what it is sent of the target's features, and what is left out."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from core.config import SpeculationConfig
from core.records import DraftRequest, DraftUpdate, Features, VerifyRequest, Want
from core.speculation import ROOT, NewNodes
from orchestrator.policy.policies import Controller
from orchestrator.session import messages as m
from orchestrator.session.drafts.block_chooser import BlockChooser
from tests.orchestrator.fakes import FakeTargetEngine, model_info, plain, request
from tests.orchestrator.session.test_growing import PROMPT, Stage

WIDTH = 2
HEAD = replace(model_info("draft"), feature_layers=(-1,), feature_width=WIDTH, reads_prefix=True)
TEXT = plain(PROMPT, 30)


def features(first, end):
    """Each row is its position."""
    return Features(first, WIDTH, b"".join(position.to_bytes(2, "little") * WIDTH for position in range(first, end)))


class HeadStage(Stage):
    def verdict(self, changed=lambda features: features):
        self.now_s += 0.1
        asked = self.last(VerifyRequest)
        reply = self.target.verify(asked)
        first = 0 if Want.PREFIX_FEATURES in asked.wants and not asked.base.num_tokens else asked.num_committed - 1
        reply = replace(reply, features=changed(features(first, asked.num_committed + len(reply.path))))
        return self.event(m.TargetReplied(reply, self.now_s - 0.1, self.now_s))

    @property
    def message(self):
        return self.last(DraftRequest)


@pytest.fixture
def stage(tokenizer):
    return HeadStage(tokenizer, draft=HEAD)


def test_a_head_gets_features_up_to_the_last_token(stage):
    assert stage.count(DraftRequest) == 0, "nothing is known before the first verdict"
    assert set(stage.last(VerifyRequest).wants) == {Want.FEATURES, Want.PREFIX_FEATURES}
    stage.verdict()
    assert stage.message.features == features(0, len(PROMPT))
    assert set(stage.last(VerifyRequest).wants) == {Want.FEATURES}


OF_ANOTHER_ENGINE, OF_A_LOST_VERDICT = 1000, 2000


def marked(known, mark):
    """Features that tell which engine they are from."""
    rows = [int.from_bytes(known.rows[at : at + 2], "little") + mark for at in range(0, len(known.rows), 2)]
    return replace(known, rows=b"".join(row.to_bytes(2, "little") for row in rows))


def test_after_a_swap_of_the_target_no_features_of_the_old_one_are_taken_in(stage):
    """A session with an open message learns of the swap by it, an idle one by its next: no verdict lies between."""
    for _ in range(2):
        stage.verdict()
    asked, known_end = stage.last(VerifyRequest), stage.message.features.end
    stage.event(m.TargetLost(1, "it was swapped"))
    late = stage.target.verify(asked)
    late = replace(late, features=marked(features(known_end, asked.num_committed + len(late.path)), OF_A_LOST_VERDICT))
    assert stage.event(m.TargetReplied(late)) == []
    stage.target = FakeTargetEngine(epoch=2)
    stage.event(m.TargetLeased("t2", 2))
    assert stage.event(m.TargetReplied(late)) == [], "nor under the new lease"
    stage.verdict(lambda known: marked(known, OF_ANOTHER_ENGINE))
    sent = stage.message.features
    assert sent.since(known_end) == marked(features(known_end, sent.end), OF_ANOTHER_ENGINE)
    assert stage.tokens == TEXT[:3]


def test_after_a_swap_of_its_engine_an_idle_head_is_sent_all_anew_and_its_old_guesses_are_stale(stage):
    """Nothing tells the session while no message is open: the next one does, and takes nothing of the old engine for
    granted."""
    stage.verdict()
    old = stage.message
    update = DraftUpdate(old.stamp, NewNodes(0, (ROOT,), (7,), (0,), (0.9,), (0.9,)), old.num_committed - 1)
    stage.event(m.DraftReplied(replace(update, is_over=True), 0.0, 0.1))
    stage.verdict()
    assert stage.message.stamp.epoch == 1, "nobody has told it"
    stage.event(m.DraftLost(1))
    stage.event(m.DraftLeased("d2", 2))
    assert (stage.message.stamp.epoch, stage.message.base.num_tokens) == (2, 0)
    assert stage.message.growth.reports_all
    assert stage.message.features == features(0, stage.message.num_committed - 1)
    num_stale = stage.session.stats.num_stale_replies
    stage.event(m.DraftReplied(update, 0.0, 0.1))
    assert stage.session.stats.num_stale_replies == num_stale + 1
    assert len(stage.session._blocks.tree) == 0


BAD = {
    "of another width": lambda known: replace(known, width=1),
    "of no width": lambda known: replace(known, width=0),
    "without rows": lambda known: replace(known, rows=b""),
    "cut off": lambda known: replace(known, rows=known.rows[:-1]),
    "too many": lambda known: replace(known, rows=2 * known.rows),
    "before the text": lambda known: replace(known, first=-9),
    "of later tokens": lambda known: replace(known, first=known.first + 1),
    "of earlier tokens": lambda known: replace(known, first=known.first - 1),
    "NaN": lambda known: replace(known, rows=b"\xc0\x7f" + known.rows[2:]),
    "infinite": lambda known: replace(known, rows=known.rows[:-2] + b"\x80\xff"),
}


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("changed", BAD.values(), ids=BAD)
def test_features_that_cannot_be_are_left_out_and_the_head_goes_on_after_the_gap(stage, changed, when, caplog):
    for _ in range(when):
        stage.verdict()
    num_messages = stage.count(DraftRequest)
    for _ in range(2):
        stage.verdict(changed)
    assert stage.count(DraftRequest) == num_messages, "it has no features of the newest tokens"
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "said once"
    assert "features" in caplog.text
    assert Want.PREFIX_FEATURES in stage.last(VerifyRequest).wants
    stage.verdict()
    assert stage.message.features == features(stage.message.num_committed - 2, stage.message.num_committed - 1)
    assert stage.tokens == TEXT[: when + 3]


@pytest.mark.parametrize(("policy", "tokens"), [("static_tree", (3, 4, 5, 8)), ("static", (3, 4, 5))])
def test_guesses_of_a_head_stay_until_it_corrects_them_in_the_shape_that_the_policy_verifies(policy, tokens):
    """Its tree is numbered anew after each verdict; the block that is sent at once comes from the earlier nodes."""
    config = SpeculationConfig(policy=policy, max_draft_tokens=4, max_block_tokens=4)
    chooser = BlockChooser(Controller(config).policy(request()), is_sampled=False)
    chances = (0.9, 0.8, 0.7, 0.05)
    chooser.tree.add(NewNodes(0, (ROOT, 0, 1, ROOT), (3, 4, 5, 8), (0, 0, 0, 1), chances, chances))
    chooser.restart()
    assert chooser.has_drafted
    assert not chooser.tree.has_drafted
    assert chooser.tree.num_reported == 0
    assert chooser.block(4, 4).tree.tokens == tokens
    chooser.reroot([3])
    assert not chooser.has_drafted
    assert len(chooser.tree) == 0
