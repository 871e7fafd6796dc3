"""Each record arrives as it was sent, to the last bit; and what is none is refused."""

from __future__ import annotations

import math
import struct
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.records import (
    UNSOUND,
    Base,
    DraftRequest,
    DraftUpdate,
    Sampling,
    SequenceSpec,
    Stamp,
    Verdict,
    VerifyRequest,
    is_sound,
)
from core.speculation.growth import NewNodes, TreeSpec
from core.speculation.token_tree import ROOT, SparseDistribution, TokenTree
from deploy.link.replies import decode_replies, encode_loss, encode_replies, encode_working
from deploy.link.requests import decode_requests, encode_requests
from deploy.link.stream import LinkError
from protos.outrider.link.v1 import link_pb2 as pb
from protos.outrider.v1 import generation_pb2 as api
from tests.deploy.link import records

STAMP = Stamp("a", 2**62 - 1, 3)


@given(st.lists(records.verify_requests, min_size=1, max_size=3))
def test_verifications_arrive_as_they_were_sent(batch):
    assert decode_requests(encode_requests(batch)) == batch


@given(st.lists(records.offers, min_size=1, max_size=3))
def test_offers_arrive_as_they_were_sent(batch):
    assert decode_requests(encode_requests(batch)) == batch


@given(st.lists(records.draft_requests, min_size=1, max_size=3))
def test_draft_requests_arrive_as_they_were_sent(batch):
    assert decode_requests(encode_requests(batch)) == batch


@given(st.lists(records.replies, max_size=4))
def test_replies_arrive_as_they_were_sent(replies):
    assert decode_replies(encode_replies(replies)) == (replies, None, [])


def test_what_is_left_to_its_default_arrives_as_the_default():
    for request in (VerifyRequest(STAMP, Base(0, 0), (1,)), DraftRequest(STAMP, Base(0, 0), (1,), TreeSpec(1, 1))):
        (arrived,) = decode_requests(encode_requests([request]))
        assert arrived == request
        assert arrived.spec is None


def test_unsound_scores_are_told_from_none():
    """Scores of a beam after which no token may come, and of one whose scores are NaN."""
    verdict = Verdict(STAMP, (), 0, 1, likeliest=((), UNSOUND, ((7, -0.5),)))
    ((arrived,), _, _) = decode_replies(encode_replies([verdict]))
    assert [is_sound(each) for each in arrived.likeliest] == [True, False, True]
    assert (arrived.likeliest[0], arrived.likeliest[2]) == ((), ((7, -0.5),))


def test_none_and_nothing_are_told_apart():
    for num_logprobs in (None, 0):
        request = VerifyRequest(STAMP, Base(0, 0), (1,), spec=SequenceSpec(1, Sampling(), num_logprobs=num_logprobs))
        (arrived,) = decode_requests(encode_requests([request]))
        assert arrived.spec.num_logprobs is num_logprobs


def test_a_probability_keeps_all_of_its_bits():
    third, rest = map(float, np.float32([1 / 3, 2 / 3]))  # q is in float32
    block = TokenTree.chain([7], [SparseDistribution((7, 128000), (third, rest))])
    request = VerifyRequest(STAMP, Base(0, 0), (1,), block)
    (arrived,) = decode_requests(encode_requests([request]))
    assert [prob.hex() for prob in arrived.block.q[0].probs] == [third.hex(), rest.hex()]
    new_nodes = NewNodes(0, (ROOT,), (7,), (0,), (0.5,), (0.5,), q=block.q)
    (grown,), *_ = decode_replies(encode_replies([DraftUpdate(STAMP, new_nodes, 1)]))
    assert [prob.hex() for prob in grown.new_nodes.q[0].probs] == [third.hex(), rest.hex()]


def test_every_kind_of_record_has_all_its_fields_on_the_wire():
    """One that is added to a record and forgotten here would arrive as its default."""
    by_other_names = {
        "calibration": {"calibration_offset", "calibration_slope"},
        "top": {"top_ids", "top_logprobs"},
    }
    from core import records as r

    for record, message in (
        (r.VerifyRequest, pb.VerifyRequest), (r.SequenceSpec, pb.SequenceSpec),
        (r.Stamp, pb.Stamp), (r.Base, pb.Base), (r.Timing, pb.Timing),
        (r.TokenLogprobs, pb.TokenLogprobs), (TreeSpec, pb.TreeSpec),
        (TokenTree, pb.TokenTree), (r.DraftRequest, pb.DraftRequest),
    ):  # fmt: skip
        names = [by_other_names.get(field.name, {field.name}) for field in fields(record)]
        assert set().union(*names) == set(message.DESCRIPTOR.fields_by_name), record
    for record, message in ((r.Verdict, pb.Verdict), (r.Missing, pb.Missing)):
        assert {field.name for field in fields(record)} - {"stamp"} == set(message.DESCRIPTOR.fields_by_name), record
    names = {field.name for record in (r.DraftUpdate, NewNodes) for field in fields(record)} - {
        "stamp",
        "new_nodes",
        "is_checked",
    }
    assert names == set(pb.DraftUpdate.DESCRIPTOR.fields_by_name)


def test_a_loss_says_why():
    assert decode_replies(encode_loss("the engine failed: out of luck")) == ([], "the engine failed: out of luck", [])


def test_what_the_engine_works_on_is_reported_by_stamp():
    stamps = [STAMP, Stamp("b", 1, 2**40)]
    assert decode_replies(encode_working(stamps)) == ([], None, stamps)


def column(kind, *values):
    return struct.pack(f"<{len(values)}{kind}", *values)


def distributions(lengths, token_ids, probs):
    return pb.Distributions(lengths=lengths, token_ids=token_ids, probs=probs)


ONES = column("f", 1, 1)
NEW_NODES = {
    "first": 5,
    "parents": column("i", 4, 5),
    "tokens": column("i", 1, 2),
    "ranks": column("i", 0, 0),
    "chances": ONES,
    "confidences": ONES,
    "root": 4,
}


def test_what_is_told_arrives_unless_it_is_corrupt():
    (reply,), *_ = decode_replies(
        pb.Replies(replies=[pb.Reply(draft_update=pb.DraftUpdate(**NEW_NODES))]).SerializeToString()
    )
    assert (reply.new_nodes.first, reply.new_nodes.tokens.tolist(), reply.new_nodes.root) == (5, [1, 2], 4)


def spec(**fields):
    sampling = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0} | fields
    return pb.SequenceSpec(
        verification=pb.VERIFICATION_COUPLED, sampling=pb.Sampling(params=api.SamplingParams(**sampling))
    )


def tree_spec(**fields):
    sound = {"rows_per_pass": 1, "max_depth": 1, "fanout": 1, "measure": pb.MEASURE_MARGIN}
    return pb.DraftRequest(growth=pb.TreeSpec(**sound | fields))


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (pb.VerifyRequest(block=pb.TokenTree(tokens=[1])), "one parent"),
        (pb.VerifyRequest(block=pb.TokenTree(tokens=[1], parents=[0])), "parents before their children"),
        (pb.VerifyRequest(block=pb.TokenTree(tokens=[1], parents=[-1], q=pb.Distributions(lengths=[2]))), "lengths"),
        (pb.VerifyRequest(spec=pb.SequenceSpec(verification=9)), "an invalid request"),
        (pb.VerifyRequest(spec=spec(temperature=math.nan)), "temperature"),
        (pb.VerifyRequest(spec=spec(top_p=-1.0)), "top_p"),
        (pb.VerifyRequest(spec=spec(logit_bias={1: 200.0})), "logit_bias"),
        (tree_spec(max_depth=0), "room for a node"),
        (tree_spec(min_path_prob=math.nan), "bounds"),
        (tree_spec(min_confidence=1.5), "bounds"),
        (tree_spec(fanout=0), "room for a node"),
        (tree_spec(measure=0), "an invalid request"),
        (tree_spec(tail=[0.9, 0.9]), "chances"),
        (tree_spec(calibration_slope=math.inf), "chances"),
        (pb.VerifyRequest(wants=[0]), "an invalid request"),
        (pb.VerifyRequest(wants=[pb.WANT_SAMPLES, 9]), "an invalid request"),
        (pb.DraftRequest(), "an invalid request"),
    ],
)
def test_a_request_that_cannot_be_one_is_refused(message, problem):
    kind = "verify" if isinstance(message, pb.VerifyRequest) else "draft"
    with pytest.raises(LinkError, match=problem):
        decode_requests(pb.Requests(**{kind: [message]}).SerializeToString())


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        pb.Replies(replies=[pb.Reply()]).SerializeToString(),
        *(
            pb.Replies(replies=[pb.Reply(draft_update=pb.DraftUpdate(**{**NEW_NODES, **fields}))]).SerializeToString()
            for fields in (
                {"tokens": column("i", 3)},
                {"tokens": column("i", 1, 2)[:-1]},
                {"parents": column("i", 4, 6)},
                {"chances": column("f", 0.0, 1.0)},
                {"chances": column("f", 1.0, math.nan)},
                {"confidences": column("f", 1.0, 1.5)},
                {"root": 5},
                {"q": pb.Distributions(lengths=[1])},
                {"q": distributions([1], column("i", 1), column("f", 1.0))},
                {"q": distributions([1, 1], column("i", 1, 2)[:-1], column("f", 1.0, 1.0))},
                {"q": distributions([1, 1], column("i", 1, 2), column("f", 1.0, 1.5))},
                {"q": distributions([1, 1], column("i", 1, 2), column("f", 1.0, math.nan))},
            )
        ),
    ],
)
def test_a_reply_that_cannot_be_one_is_refused(frame):
    with pytest.raises(LinkError):
        decode_replies(frame)


def test_a_plain_step_takes_a_hundred_bytes():
    request = VerifyRequest(Stamp("generate-1#1@0badcafe", 2**62 - 1, 30), Base(1000, 2**61 - 2), (5,))
    verdict = Verdict(request.stamp, (), 7, 1000)
    assert len(encode_requests([request])) < 100
    assert len(encode_replies([verdict])) < 100
