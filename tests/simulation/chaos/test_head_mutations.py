"""Faults of features, which heads read, are planted in the orchestrator and in what engines do: chaos catches each.

The seed that catches one holds with nothing planted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.protocol import HeldTokens
from core.records import Features
from orchestrator.session.drafts.draft_side import DraftSide
from orchestrator.session.drafts.drafts import Drafts
from orchestrator.session.drafts.feature_log import FeatureLog
from simulation.chaos.run import run_seed
from simulation.engines import target as sim_target
from simulation.engines.features import features_of

MAX_SEEDS = 200


def stale_features(patch):
    """A head gets what is known of the text, though the newest features have not come, and takes them for those."""
    fitting = DraftSide._fitting_features

    def stale(self):
        known = fitting.fget(self) or self.features.since(0)
        return known and replace(known, first=len(self._log) - 1 - known.num_tokens)

    patch(DraftSide, "_fitting_features", property(stale))


def features_of_a_dropped_branch(patch):
    """A target returns the features of the block's first nodes in place of the accepted ones."""
    features = sim_target._features

    def of_first_nodes(job, outcome):
        found = features(job, outcome)
        if found is None or not outcome.path:
            return found
        log, block = job.held.log, job.request.block
        text = type(log)([*log.tokens[: len(log) - len(outcome.path)], *block.tokens[: len(outcome.path)]])
        return features_of(text, found.first, found.end)

    patch(sim_target, "_features", of_first_nodes)


def features_of_guesses_kept(patch):
    """A head's engine keeps rows of guesses that were accepted, which come from the head's own features."""

    def keeping(self, request, tree_spec):
        self.builder.set_spec(tree_spec)
        rebased = self._rebase(request.base, request.suffix, keeps_guesses=True)
        self.builder.begin()
        return rebased if rebased.pending else self._without_last(rebased)

    patch(HeldTokens, "rebase_to_grow", keeping)


def features_shifted(patch):
    """Each token gets the features of the one before it: the first are there twice, the last are not."""
    since = FeatureLog.since

    def shifted(self, position):
        known = since(self, position)
        if known is None or known.num_tokens < 2:
            return known
        size = 2 * known.width
        return replace(known, rows=known.rows[:size] + known.rows[:-size])

    patch(FeatureLog, "since", shifted)


def features_doubled(patch):
    """Features that a new target sends again are kept twice."""

    def add(self, features):
        self._pieces.append(features)

    patch(FeatureLog, "add", add)


def features_of_another_session(patch):
    """All sessions keep theirs at the same place."""
    init, shared = Drafts.__init__, FeatureLog()

    def init_shared(self, *given):
        init(self, *given)
        self._features = shared
        for draft in self._all:
            draft.features = shared

    patch(Drafts, "__init__", init_shared)


def features_not_checked(patch):
    patch(Features, "problem", lambda *_: None)


def features_that_are_nan(patch):
    patch(Features, "is_finite", True)


PLANTED = [
    stale_features,
    features_of_a_dropped_branch,
    features_of_guesses_kept,
    features_shifted,
    features_doubled,
    features_of_another_session,
    features_not_checked,
    features_that_are_nan,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_of_features_is_caught(plant, monkeypatch):
    with monkeypatch.context() as patch:
        plant(patch.setattr)
        seeds = range(MAX_SEEDS)
        caught = next((seed for seed in seeds if run_seed(seed, has_heads=True).error is not None), None)
    assert caught is not None, f"{MAX_SEEDS} seeds do not notice {plant.__name__}"
    assert run_seed(caught, has_heads=True).error is None, "it is caught with nothing planted, too"
