"""Receipts, samples and explanations of the running demo pair, by both languages and the command."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from deploy.cli import main
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def _command_has_the_token(guarded, monkeypatch):
    monkeypatch.setenv("OUTRIDER_TOKEN", guarded.token)


def test_sample_i_depends_on_the_seed_and_i_alone(grpc_client):
    def outputs(num_samples, seed=5):
        completion = grpc_client.generate(PROMPT, n=num_samples, seed=seed, temperature=1.0, max_tokens=16)
        return [(sample.token_ids, sample.finish.seed) for sample in completion.samples]

    few, many = outputs(4), outputs(8)
    assert many[:4] == few
    assert len({tokens for tokens, _ in many}) == 8
    alone = [grpc_client.generate(PROMPT, seed=seed, temperature=1.0, max_tokens=16).token_ids for _, seed in few]
    assert alone == [tokens for tokens, _ in few]


def test_a_receipt_is_the_same_by_both_languages_and_names_what_computed(grpc_client, guarded):
    while grpc_client.model_info().draft is None:  # it may start after the target
        time.sleep(0.1)
    completion = grpc_client.generate(PROMPT, seed=5, temperature=1.0, max_tokens=16, receipt=True)
    body = {"prompt": PROMPT, "seed": 5, "temperature": 1.0, "max_tokens": 16, "receipt": True}
    request = urllib.request.Request(
        f"{guarded.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {guarded.token}"},
    )
    with urllib.request.urlopen(request) as reply:
        by_http = json.load(reply)["choices"][0]["outrider"]["receipt"]
    receipt = completion.finish.receipt
    assert by_http == receipt
    assert receipt["target"]["digest"].startswith("sha256:")
    assert receipt["target"]["digest"] != receipt["draft"]["digest"]
    assert receipt["target"]["deterministic"]
    assert not receipt["draft"]["deterministic"]
    assert "torch" in receipt["target"]["arithmetic"]
    assert grpc_client.generate(PROMPT, max_tokens=1).finish.receipt is None


def test_a_saved_output_is_computed_again(grpc_client, guarded, tmp_path, capsys):
    address, file = guarded.address, str(tmp_path / "receipt.json")
    asked = ["generate", PROMPT, "--address", address, "--max-tokens", "24", "--seed", "3", "--save", file]
    assert main.main(asked) == 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(grpc_client.generate, "import os", max_tokens=60)  # company in the passes changes nothing
        assert main.main(["replay", file, "--address", address]) == 0
    assert "same: all 24 tokens are the same" in capsys.readouterr().err


def test_rounds_are_explained_where_that_is_asked(grpc_client, guarded, capsys):
    completion = grpc_client.generate(PROMPT, temperature=0.0, max_tokens=40, explain=True)
    lines = completion.explanation
    assert lines[0].startswith("prefill: a target takes in")
    assert len([line for line in lines if line.startswith("round ")]) == completion.finish.speculation.target_passes - 1
    # Whether the adaptive policy guesses depends on measured times; this one always does.
    static = grpc_client.generate(PROMPT, temperature=0.0, max_tokens=40, explain=True, policy="static").explanation
    assert any("accepted" in line and "draft" in line for line in static)
    assert not grpc_client.generate(PROMPT, max_tokens=8).explanation
    assert main.main(["generate", PROMPT, "--address", guarded.address, "--max-tokens", "8", "--explain"]) == 0
    assert "prefill: a target takes in" in capsys.readouterr().err


def test_a_requests_spans_are_one_tree_with_its_callers_trace_id(grpc_client, guarded, collector):
    request = pb.GenerateRequest(text=PROMPT, stopping=pb.StoppingParams(max_tokens=40, ignore_eos=True))
    metadata = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("authorization", f"Bearer {guarded.token}")]
    with grpc.insecure_channel(guarded.address) as channel:
        reply = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata)
    grpc_client.generate(PROMPT, max_tokens=4)  # of this one, whose caller has no trace, nothing is exported
    spans = collector.spans_of("request")
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.name == "request"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert root.parent_span_id.hex() == PARENT
    assert all(span.parent_span_id in by_id for span in spans if span is not root)
    assert {"queue", "lease", "prefill", "verify", "target", "round"} <= {span.name for span in spans}
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in spans)
    assert all(span.end_time_unix_nano <= root.end_time_unix_nano for span in spans)
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == reply.usage.completion_tokens
    assert PROMPT.encode() not in b"".join(
        ExportTraceServiceRequest.SerializeToString(each) for each in collector.taken
    )
