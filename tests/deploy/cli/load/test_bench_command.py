"""`outrider bench` against a server whose completions are written down, and against the real service by both APIs."""

from __future__ import annotations

import json

import pytest

from core.errors import Overloaded, UnsoundScores
from deploy.cli import main
from deploy.cli.load import BenchOptions
from tests.deploy.cli.parsing import parsed
from tests.deploy.grpc.rpc import Script, greeting, server


def run(*argv: str) -> int:
    return main.main(("bench", *argv))


def test_figures_go_to_standard_output_and_all_of_them_to_a_file(tmp_path, capsys):
    file = tmp_path / "load.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    script = Script(*greeting())
    with server(script) as address:
        argv = (
            "--address",
            address,
            "--requests",
            "6",
            "--concurrency",
            "2",
            "--prompts",
            str(prompts),
            "--warmup",
            "2",
        )
        assert run(*argv, "--warmup", "2", "--slo-e2e-ms", "60000", "--no-draft", "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert out.startswith("6 completed in ")
    for text in ("first token (TTFT)", "whole request (E2E)", "100.0% met the objectives", "of guesses accepted"):
        assert text in out
    found = json.loads(file.read_text())
    assert found["summary"]["outcomes"] == {"completed": 6}
    assert len(found["requests"]) == 6
    assert found["options"]["concurrency"] == 2
    assert found["summary"]["acceptance"] == pytest.approx(greeting()[-1].stats.acceptance_rate)
    assert len(script.requests) == 8  # the warm-up does not count
    assert {request.max_draft_tokens for request in script.requests} == {0}
    assert all(request.ignore_eos and request.max_tokens == 64 for request in script.requests)


def test_refusals_and_failures_are_counted_by_their_code_and_not_tried_again(capsys):
    script = Script(Overloaded("full", 1.0))
    with server(script) as address:
        assert run("--address", address, "--requests", "3", "--rate", "1000", "--prompt-tokens", "2-4") == 1
    assert "3 refused" in (out := capsys.readouterr().out)
    assert "3 x RESOURCE_EXHAUSTED" in out
    assert len(script.requests) == 3
    with server(Script(UnsoundScores("NaN"))) as address:
        assert run("--address", address, "--requests", "2") == 1
    assert "2 x FAILED_PRECONDITION" in capsys.readouterr().out


def test_requests_that_are_given_up_are_cancelled_at_the_server(capsys):
    script = Script(greeting()[0], is_endless=True)
    with server(script) as address:
        argv = ("--requests", "2", "--cancel-share", "1", "--output-tokens", "1", "--concurrency", "1")
        assert run("--address", address, *argv) == 1
    assert "2 cancelled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--rate", "1", "--concurrency", "2"), "--rate (an open loop) and --concurrency (a closed one) exclude"),
        (("--requests", "0"), "must be in [1, 1000000]"),
        (("--prompt-tokens", "9-3"), "must be N or LOW-HIGH"),
        (("--json", "/nowhere/load.json"), "cannot write /nowhere/load.json: /nowhere is not a directory"),
        (("--prompts", "/nowhere"), "--prompts: /nowhere cannot be read"),
        (("--address", "localhost:1"), "the service does not answer: UNAVAILABLE"),
        (("--address", "localhost:1", "--api", "http", "--warmup", "1"), "a request of the warm-up failed"),
    ],
)
def test_mistakes_are_told_in_a_line(argv, problem, capsys):
    assert run(*argv) == main.EXIT_NO_START
    assert problem in capsys.readouterr().err


def test_without_a_file_prompts_are_ids_and_without_a_rate_the_loop_is_closed():
    options = parsed(BenchOptions, ["--prompt-tokens", "5"])
    assert (options.prompts, options.rate, str(options.prompt_tokens)) == (None, None, "5")


@pytest.mark.ray
@pytest.mark.parametrize("api", ["grpc", "http"])
def test_the_real_service_under_load(api, running, cluster, tmp_path):
    file = tmp_path / "load.json"
    port = cluster.grpc_port if api == "grpc" else cluster.http_port
    argv = ("--requests", "12", "--output-tokens", "4-12", "--prompt-tokens", "3-9", "--cancel-share", "0.25")
    assert run("--api", api, "--address", f"localhost:{port}", *argv, "--rate", "20", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    outcomes, requests = found["summary"]["outcomes"], found["requests"]
    assert sum(outcomes.values()) == 12
    assert set(outcomes) <= {"completed", "cancelled"}
    assert set(found["summary"]["latencies"]) == {"ttft", "itl", "tpot", "e2e"}
    assert all(0 < each["ttft_s"] <= each["ended_s"] - each["intended_s"] for each in requests)
    complete = [each for each in requests if each["outcome"] == "completed"]
    assert all(4 <= each["output_tokens"] <= 12 and 3 <= each["prompt_tokens"] <= 9 for each in complete)
    assert found["summary"]["tokens_per_pass"] > 1
