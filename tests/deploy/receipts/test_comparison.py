"""Comparison of two receipts: which fields make a different output right, and which one is named."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from core.records import Verification
from deploy.receipts import Outcome, compare
from deploy.receipts.comparison import ARITHMETIC, DECISIVE
from tests.deploy.grpc.rpc import INFO
from tests.deploy.receipts.test_making import REQUEST, receipt_of

TOKENS = (7, 8, 9)
DRAFT = replace(INFO, name="draft", digest="sha256:whole", layers=(0, 2))
BEFORE = receipt_of(REQUEST, TOKENS)
BEFORE["target"]["deterministic"] = True


def changed(path, value, tokens=TOKENS):
    now = deepcopy(receipt_of(REQUEST, tokens))
    now["target"]["deterministic"] = True
    *groups, last = path.split(".")
    owner = now
    for group in groups:
        owner = owner[group]
    owner[last] = value
    return now


def outcome(now, tokens=TOKENS, before=BEFORE, kept=TOKENS):
    verdict = compare(before, now, kept, tokens)
    return verdict.outcome, verdict.reason


def test_the_same_is_the_same_whatever_computed_it():
    assert outcome(BEFORE) == (Outcome.SAME, "all 3 tokens are the same")
    assert outcome(changed("target.arithmetic", "another machine"))[0] is Outcome.SAME
    assert outcome(changed("model", "another name"))[0] is Outcome.SAME
    assert outcome(changed("draft", {"name": "another"}))[0] is Outcome.SAME


@pytest.mark.parametrize(("tokens", "first"), [((7, 0, 9), 1), ((7, 8), 2), ((7, 8, 9, 1), 3), ((), 0)])
def test_another_output_differs_from_a_token_on(tokens, first):
    now = changed("version", BEFORE["version"], tokens)
    kind, reason = outcome(now, tokens)
    assert kind is Outcome.DIFFERS
    assert f"from token {first} on" in reason
    assert "nothing in the receipt explains it" in reason
    assert "not known" in outcome(now, tokens, kept=None)[1]


@pytest.mark.parametrize("path", [*DECISIVE, "sampling.seed", "stopping.max_tokens"])
def test_another_computation_is_not_comparable_and_the_field_is_named(path):
    kind, reason = outcome(changed(path, "other"))
    assert kind is Outcome.NOT_COMPARABLE
    assert f"{path} differs" in reason
    assert "all 3 tokens are the same" in reason


@pytest.mark.parametrize("path", ARITHMETIC)
def test_last_bits_are_named_where_they_may_be_to_blame(path):
    kind, reason = outcome(changed(path, "other", (7, 0)), (7, 0))
    assert kind is Outcome.DIFFERS
    assert f"{path} differs" in reason


def test_guesses_and_company_may_be_to_blame():
    guessed = {**BEFORE, "verification": "rejection", "depends_on_guesses": True}
    now = {**changed("verification", "rejection", (7, 0)), "depends_on_guesses": True}
    assert outcome(now, (7, 0), guessed)[0] is Outcome.NOT_COMPARABLE
    loose = deepcopy(BEFORE)
    loose["target"]["deterministic"] = False
    assert "other requests in a pass" in outcome(changed("version", BEFORE["version"], (7, 0)), (7, 0), loose)[1]


def test_where_guesses_decide_too_another_draft_is_named():
    """One out of some of the target's layers has the digest of its whole checkpoint, whichever they are."""

    def drafted(layers, tokens):
        receipt = receipt_of(replace(REQUEST, verification=Verification.REJECTION), tokens, draft=DRAFT)
        return {**receipt, "draft": {**receipt["draft"], "layers": layers}}

    before = drafted([0, 2], TOKENS)
    kind, reason = outcome(drafted([0, 3], (7, 0)), (7, 0), before)
    assert kind is Outcome.NOT_COMPARABLE
    assert "draft.layers differs ([0, 2], now [0, 3])" in reason
    assert "draft." not in outcome(drafted([0, 2], (7, 0)), (7, 0), before)[1]
    assert outcome(drafted([0, 3], TOKENS), TOKENS, before)[0] is Outcome.SAME, "which it was then is no matter"


def test_a_receipt_from_before_there_were_layers_compares():
    request, draft = replace(REQUEST, verification=Verification.REJECTION), replace(DRAFT, layers=())
    old, now = receipt_of(request, TOKENS, draft=draft), receipt_of(request, (7, 0), draft=draft)
    old["draft"] = {name: value for name, value in old["draft"].items() if name != "layers"}
    assert "draft." not in outcome(now, (7, 0), old)[1]


def test_every_field_of_a_receipt_has_a_place():
    """A new field must be given one: decisive, arithmetic, or of no weight."""
    named = {path.partition(".")[0] for path in (*DECISIVE, *ARITHMETIC)}
    weightless = {"model", "draft", "prompt_tokens", "output_digest", "output_tokens", "depends_on_guesses"}
    assert set(BEFORE) | {"lenience", "draft", "adapter_digest"} == named | weightless
