"""Each name in the table of rules is one on every wire, and in the client."""

from typing import get_args

from core.rules import Verification
from deploy.grpc.translate import VERIFICATIONS
from outrider_client import Verification as Named
from outrider_client._resume import RELAXED
from protos.outrider.link.v1 import link_pb2
from protos.outrider.v1 import generation_pb2

WIRE_NAMES = ["VERIFICATION_UNSPECIFIED", *(f"VERIFICATION_{each.name}" for each in Verification)]


def test_both_protos_have_them_and_no_others():
    assert generation_pb2.Verification.keys() == WIRE_NAMES
    assert link_pb2.Verification.keys() == WIRE_NAMES
    assert list(VERIFICATIONS.values()) == list(Verification)


def test_the_client_has_them():
    assert get_args(Named) == tuple(Verification)


def test_the_client_resumes_no_stream_of_a_relaxed_rule():
    relaxed = {f"VERIFICATION_{each.name}" for each in Verification if not each.rule.is_lossless}
    assert {generation_pb2.Verification.Name(each) for each in RELAXED} == relaxed
