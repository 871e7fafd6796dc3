"""Receipts of outputs, worked out by hand."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from core.records import Chunk, FinishReason, GenerationRequest, Grammar, GrammarKind, Sampling, Usage, Verification
from deploy.grpc.responses import to_chunk
from deploy.receipts import ReceiptMaker, receipt_fields
from tests.deploy.grpc.rpc import INFO

REQUEST = GenerationRequest("r", (1, 258), Sampling(temperature=0.5, seed=2**64 - 1), 9)


def receipt_of(request, *outputs, draft=None):
    maker = ReceiptMaker(request, "pair", INFO, draft, "sha256:tokenizer")
    chunks = [Chunk("", tokens, (False,) * len(tokens), Usage(2, 0)) for tokens in outputs]
    *others, last = [
        maker.observe(chunk) for chunk in [*chunks[:-1], replace(chunks[-1], finish_reason=FinishReason.STOP)]
    ]
    assert all(chunk.receipt is None for chunk in others)
    return receipt_fields(last.receipt)


def test_prompt_and_output_are_digests_of_their_ids():
    fields = receipt_of(REQUEST, (7,), (8, 9))
    assert fields["prompt_digest"] == "sha256:" + hashlib.sha256(b"\x01\0\0\0\x02\x01\0\0").hexdigest()
    assert fields["output_digest"] == "sha256:" + hashlib.sha256(b"\x07\0\0\0\x08\0\0\0\x09\0\0\0").hexdigest()
    assert (fields["prompt_tokens"], fields["output_tokens"]) == (2, 3)
    assert fields["sampling"]["seed"] == 2**64 - 1


def test_a_resumed_output_has_the_receipt_of_the_whole():
    resumed = receipt_of(replace(REQUEST, resume_tokens=(7, 8)), (9,))
    assert resumed == receipt_of(REQUEST, (7, 8), (9,))


def test_an_output_depends_on_guesses_by_its_rule_alone():
    def depends(**changes):
        return receipt_of(replace(REQUEST, **changes), (7,))["depends_on_guesses"]

    assert not depends()
    assert depends(verification=Verification.REJECTION)
    assert depends(verification=Verification.TYPICAL)
    assert not depends(verification=Verification.REJECTION, max_draft_tokens=0)
    assert not depends(verification=Verification.BLOCK, sampling=Sampling(temperature=0.0))
    assert depends(verification=Verification.LENIENT_COUPLED, lenience=0.5, sampling=Sampling(temperature=0.0))


def test_lenience_stands_where_a_rule_takes_it_and_a_grammar_by_its_digest():
    assert "lenience" not in receipt_of(REQUEST, (7,))
    lenient = replace(REQUEST, verification=Verification.LENIENT_COUPLED, lenience=0.5)
    assert receipt_of(lenient, (7,))["lenience"] == 0.5
    grammars = [None, Grammar(GrammarKind.REGEX, "a"), Grammar(GrammarKind.LARK, "a"), Grammar(GrammarKind.REGEX, "b")]
    digests = [receipt_of(replace(REQUEST, grammar=each), (7,))["structured_output_digest"] for each in grammars]
    assert digests[0] == ""
    assert len(set(digests)) == 4


def test_a_draft_of_some_layers_says_which():
    def layers(layers):
        return receipt_of(REQUEST, (7,), draft=replace(INFO, layers=layers))["draft"]["layers"]

    assert layers((0, 2, 5)) == [0, 2, 5]
    assert layers(()) == []
    assert receipt_of(REQUEST, (7,))["target"]["layers"] == []


def test_the_message_has_the_layers_too():
    maker = ReceiptMaker(REQUEST, "pair", INFO, replace(INFO, layers=(1, 3)), "")
    last = maker.observe(Chunk("", (7,), (False,), Usage(2, 1), finish_reason=FinishReason.STOP))
    receipt = to_chunk(last, REQUEST, 0, last.usage).finish.receipt
    assert (list(receipt.draft.layers), list(receipt.target.layers)) == ([1, 3], [])
