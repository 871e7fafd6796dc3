from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys

import pytest

from core.errors import InvalidRequest, Unavailable
from core.records import BeamSearch, Verification
from deploy.cli import main, terminal
from deploy.cli.serve import ServeOptions, explained
from deploy.defaults import describe_settings
from deploy.grpc import servicer as rpc
from deploy.launch import local
from deploy.settings import read_fleet, single_models
from outrider_client import Chunk, Usage
from tests.deploy.cli.parsing import parsed
from tests.deploy.grpc.rpc import Script, greeting, server


def run(*argv: str) -> int:
    return main.main(argv)


# outrider generate


def test_text_goes_to_standard_output_and_statistics_to_standard_error(capsys):
    with server(Script(*greeting())) as address:
        assert run("generate", "say", "--address", address, "--seed", "7") == 0
    out, err = capsys.readouterr()
    assert out == "hello word\n"
    assert "2 target passes" in err
    assert "guesses accepted" in err
    assert "75% of 4 next blocks were ready; 80% of 0.50 s of drafting hidden" in err
    assert err.rstrip().endswith("seed 7")


def test_colour_tells_guesses_from_the_targets_own(capsys):
    with server(Script(*greeting())) as address:
        assert run("generate", "say", "--address", address, "--color", "always") == 0
    out, err = capsys.readouterr()
    own, guessed, reset = terminal.CORRECTED, terminal.GUESSED, terminal.RESET
    assert out == f"{own}hello{reset}{guessed} wor{reset}{own}d{reset}\n"
    assert terminal.LEGEND in err


def test_every_option_reaches_the_request():
    script = Script(*greeting())
    numbers = "--max-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.5 --seed 8"
    others = "--stop a --stop b --verification block --policy entropy --no-pipelining --no-draft"
    with server(script) as address:
        run("generate", "say", "--address", address, *numbers.split(), *others.split())
    request = script.requests[0]
    assert (request.max_tokens, request.stop) == (9, ("a", "b"))
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)
    assert (request.sampling.top_p, request.sampling.seed) == (0.5, 8)
    assert (request.verification, request.max_draft_tokens) == (Verification.BLOCK, 0)
    assert (request.policy, request.pipelining) == ("entropy", False)


def test_a_search_with_beams_reaches_the_request_and_is_shown_at_its_end(capsys):
    script = Script(*greeting())
    with server(script) as address:
        run("generate", "say", "--address", address, "--beam-width", "3", "--length-penalty", "0.5")
    assert script.requests[0].beams == BeamSearch(3, 1, 0.5)
    assert capsys.readouterr().out == "hello word\n"


def test_what_is_not_given_is_the_servers_to_decide():
    script = Script(*greeting())
    with server(script) as address:
        run("generate", "say", "--address", address)
    assert script.requests[0].sampling.temperature == 0.7
    assert script.requests[0].max_draft_tokens is None
    assert (script.requests[0].policy, script.requests[0].pipelining) == (None, None)


def test_the_prompt_may_come_from_standard_input(monkeypatch):
    script = Script(*greeting())
    monkeypatch.setattr(sys, "stdin", io.StringIO("say"))
    with server(script) as address:
        run("generate", "-", "--address", address)
        run("generate", "say", "--address", address)
    assert script.requests[0].prompt == script.requests[1].prompt


@pytest.mark.parametrize(("prompts", "prefix"), [((), None), (("ab",), "ab")])
def test_a_source_goes_beside_a_prefix_or_alone(prompts, prefix, monkeypatch, capsys):
    """The server's model is a decoder, so its refusal shows that the source has arrived, by its name."""
    seen = []
    monkeypatch.setattr(rpc.translate, "to_requests", lambda message, *_: seen.append(message) or _refused())
    monkeypatch.setattr(sys, "stdin", io.StringIO("the source"))
    with server(Script()) as address:
        assert run("generate", *prompts, "--source", "-", "--address", address) == 1
    assert seen[0].source == "the source"
    assert (seen[0].text if seen[0].HasField("text") else None) == prefix


def _refused():
    raise InvalidRequest("source", "must not be given")


@pytest.mark.parametrize(("argv", "problem"), [((), "PROMPT is missing"), (("-", "--source", "-"), "not both")])
def test_a_call_without_a_prompt_or_with_one_input_for_two_is_refused(argv, problem, capsys):
    assert run("generate", *argv) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("command", [("generate", "say"), ("chat",)])
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--length-penalty 2", "--length-penalty must not be given without --beam-width"),
        ("--no-draft --guesser prompt_lookup", "--guesser must not be given beside --no-draft, which makes no guesses"),
        ("--no-draft --template a+", "--template must not be given beside --no-draft"),
        ("--no-draft --draft-temperature 1", "--draft-temperature must not be given beside --no-draft"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(command, flags, problem, capsys):
    assert run(*command, *flags.split()) == 1
    assert problem in capsys.readouterr().err


def test_without_a_server_the_user_is_told_how_to_start_one(capsys):
    assert run("generate", "say", "--address", "localhost:1") == 1
    assert "start one with: outrider serve" in capsys.readouterr().err


def test_a_refusal_is_shown_as_the_server_words_it(capsys):
    with server(Script()) as address:
        assert run("generate", "say", "--address", address, "--max-tokens", "1000") == 1
    err = capsys.readouterr().err
    assert err.startswith("outrider: INVALID_ARGUMENT: ")
    assert "stopping.max_tokens: must be in [1, 19" in err


def test_a_server_that_is_there_but_cannot_take_the_request_is_not_called_missing(capsys):
    with server(Script(Unavailable("no target grants a place"))) as address:
        assert run("generate", "say", "--address", address) == 1
    assert "no target grants a place" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--top-k", "-1", "must be 0 (keeps all) or in [1, 2147483647], got -1"),
        ("--top-k", "1.5", "valid integer"),
        ("--top-p", "2", "must be in (0, 1], got 2.0"),
        ("--top-p", "nan", "must be in (0, 1], got nan"),
        ("--temperature", "-0.5", "must be 0 (greedy) or in [0.001, 100], got -0.5"),
        ("--max-tokens", "0", "must be in [1, "),
        ("--seed", "18446744073709551616", "must be in [0, "),
        ("--verification", "none", "'coupled', 'rejection', 'block'"),
        ("--policy", "none", "'adaptive', 'static'"),
        ("--color", "blue", "'--color': 'blue' is not one of 'auto', 'always', 'never'"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_before_the_call_by_its_option(option, value, allowed, capsys):
    assert run("generate", "say", option, value) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"outrider: Invalid value for '{option}': ")
    assert allowed in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("words", "begins"), [((), "serve"), (("keys",), "new")])
def test_who_says_no_command_is_shown_those_there_are(words, begins, capsys):
    assert run(*words) == 2
    shown = capsys.readouterr()
    assert f"│ {begins} " in shown.out + shown.err
    assert "outrider: " not in shown.err


def test_it_says_its_version(capsys):
    assert run("--version") == 0
    assert re.fullmatch(r"outrider \d+\.\d+\S*\n", capsys.readouterr().out)


def test_each_command_explains_its_options_without_ray_or_torch():
    code = """
import sys
from deploy.cli.main import main
status = [main([command, "--help"]) for command in ("serve", "generate", "simulate", "theory", "check")]
sys.exit(any(status) or bool({"ray", "torch", "transformers"} & sys.modules.keys()))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for option in ("--drain-timeout", "--top-p", "--session-kv", "--no-weights", "--print-config"):
        assert option in told


@pytest.mark.parametrize(
    ("words", "completed"),
    [("ge", "generate"), ("generate --top-k -1 --tempe", "--temperature"), ("generate --policy ent", "entropy")],
)
def test_a_shell_can_complete_commands_options_and_choices(words, completed, monkeypatch, capsys):
    monkeypatch.setenv("_OUTRIDER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"outrider {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    with pytest.raises(SystemExit) as caught:
        main.main([])
    assert caught.value.code == 0
    assert capsys.readouterr().out.split() == [completed]


def test_several_prompts_run_side_by_side_and_are_shown_in_order(capsys):
    script = Script(*greeting())
    with server(script) as address:
        assert run("generate", "one", "two\n", "--address", address, "--max-tokens", "9") == 0
    out, err = capsys.readouterr()
    assert out == "hello word\n" * 2
    assert len({request.prompt for request in script.requests}) == 2
    assert err.index("--- one") < err.index("--- two\\n")
    assert err.count("2 target passes") == 2


# outrider generate --trace


def test_a_trace_shows_the_rounds_of_each_prompt(tmp_path, capsys):
    with server(Script(*greeting())) as address:
        assert run("generate", "one", "two", "--address", address, "--trace", str(tmp_path / "t.json")) == 0
    assert f"trace of 2 streams in {tmp_path}/t.json" in capsys.readouterr().err
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "stream 1: one",
        "stream 2: two",
    }
    assert [event["args"]["text"] for event in events if event.get("cat") == "round"].count(" word") == 2
    assert sum(event["name"] == "grew 40: hit" for event in events) == 2
    assert sum(event["ph"] == "f" for event in events) == 2


def test_a_trace_may_be_a_picture(tmp_path):
    script = Script(*greeting())
    with server(script) as address:
        assert run("generate", "say", "--address", address, "--trace", str(tmp_path / "t.svg")) == 0
    assert "<svg" in (tmp_path / "t.svg").read_text()
    assert script.requests[0].wants_trace


def test_only_who_wants_a_trace_asks_for_one():
    script = Script(*greeting())
    with server(script) as address:
        run("generate", "say", "--address", address)
    assert not script.requests[0].wants_trace


def test_what_was_traced_of_a_stream_that_failed_is_kept(tmp_path, capsys):
    with server(Script(greeting()[0], Unavailable("no target grants a place"))) as address:
        assert run("generate", "say", "--address", address, "--trace", str(tmp_path / "t.json")) == 1
    assert "no target grants a place" in capsys.readouterr().err
    assert '"prefill"' in (tmp_path / "t.json").read_text()


@pytest.mark.parametrize(
    ("script", "file", "problem"),
    [
        (Script(*[dataclasses.replace(chunk, trace=()) for chunk in greeting()]), "t.json", "nothing to trace"),
        (Script(*greeting()), "no/such/t.json", "cannot be written"),
    ],
)
def test_a_trace_that_was_not_written_is_a_failure(tmp_path, capsys, script, file, problem):
    with server(script) as address:
        assert run("generate", "say", "--address", address, "--trace", str(tmp_path / file)) == 1
    assert problem in capsys.readouterr().err


# Colours and statistics


def chunk(text: str, *guessed: bool) -> Chunk:
    return Chunk(text, tuple(range(len(guessed))), guessed, (), Usage(1, len(guessed)), None)


@pytest.mark.parametrize(
    ("piece", "parts"),
    [
        (chunk("abc", True, True, False), [("ab", True), ("c", False)]),
        (chunk("c", False), [("c", False)]),
        (chunk("ab", True, True), [("ab", True)]),
        (chunk("ab\ufffd", True, False), [("", True), ("ab\ufffd", False)]),
        (chunk("held back"), [("held back", False)]),
    ],
)
def test_a_chunk_is_split_before_the_targets_own_token(piece, parts):
    assert list(terminal.spans(piece, lambda _: "c")) == parts


def test_each_line_is_coloured_by_itself():
    assert (
        terminal.paint("a\n\nb", True) == f"{terminal.GUESSED}a{terminal.RESET}\n\n{terminal.GUESSED}b{terminal.RESET}"
    )


def test_colour_is_for_terminals_whose_user_has_not_refused_it():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert terminal.use_color("auto", Terminal(), False)
    assert not terminal.use_color("auto", Terminal(), True)
    assert not terminal.use_color("auto", io.StringIO(), False)
    assert not terminal.use_color("never", Terminal(), False)
    assert terminal.use_color("always", io.StringIO(), True)


# outrider serve and check, as far as they go without Ray


def configured(*argv: str):
    return explained(parsed(ServeOptions, argv))[0]


def test_serve_without_arguments_is_the_demo_pair_with_its_defaults():
    config = configured()
    assert config.target.engine.model.endswith("models/demo/target")
    assert local.changed_settings(config) == ["target.engine.deterministic=True"], "its tokens are compared bit by bit"


def test_flags_become_settings_and_are_shown_as_changes(tmp_path):
    pair = ("--target", str(tmp_path), "--draft", str(tmp_path))
    config = configured("--gamma", "2", "--dtype", "bfloat16", *pair, "--set", "limits.max_sessions=3")
    assert config.target.engine.model == str(tmp_path)
    assert local.changed_settings(config) == [
        "target.engine.dtype=bfloat16",
        "draft.engine.dtype=bfloat16",
        f"model_name={tmp_path.name}",
        "speculation.max_draft_tokens=2",
        "limits.max_sessions=3",
    ]


def test_a_link_to_a_draft_stays_a_link_that_may_be_switched(tmp_path):
    link = tmp_path / "current"
    link.symlink_to(tmp_path)
    config = configured("--target", str(tmp_path), "--draft", str(link))
    assert config.draft.engine.model == str(link)


def test_a_pair_may_be_served_without_its_draft():
    config = configured("--draft", "none", "--dtype", "bfloat16")
    assert config.draft is None
    assert "without a draft" in local.describe_models(config)


def test_a_draft_of_layers_says_so_in_the_lines_of_the_start():
    config = configured("--set", "draft.engine.layers=[0, 2]")
    assert local.describe_models(config).endswith("models/demo/draft (float32, layers 0,2)")
    assert describe_settings(config)[1].startswith("draft: layers 0,2 of /")


def test_flags_go_before_the_file(tmp_path):
    file = tmp_path / "outrider.yaml"
    file.write_text("target: {engine: {model: t}}\nspeculation: {max_draft_tokens: 7}\n")
    assert configured("--config", str(file)).speculation.max_draft_tokens == 7
    assert configured("--config", str(file), "--gamma", "1").speculation.max_draft_tokens == 1


def test_options_go_before_the_environment_and_that_before_the_file(tmp_path, monkeypatch):
    file = tmp_path / "outrider.yaml"
    file.write_text("target: {engine: {model: t}}\nspeculation: {max_draft_tokens: 7}\nlimits: {max_sessions: 7}")
    monkeypatch.setenv("OUTRIDER_SPECULATION__MAX_DRAFT_TOKENS", "6")
    monkeypatch.setenv("OUTRIDER_LIMITS__MAX_SESSIONS", "6")
    config = configured("--config", str(file), "--gamma", "5")
    assert (config.speculation.max_draft_tokens, config.limits.max_sessions) == (5, 6)
    assert configured("--config", str(file), "--set", "limits.max_sessions=4").limits.max_sessions == 4


def test_what_follows_from_a_target_gives_way_to_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_MODEL_NAME", "mine")
    assert configured("--target", str(tmp_path)).model_name == "mine"


def test_the_configuration_is_printed_as_a_file_that_says_the_same(tmp_path, capsys):
    flags = ("--gamma", "3", "--dtype", "bfloat16", "--set", "target.resources={big: 1}")
    assert run("serve", *flags, "--print-config") == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert configured("--config", str(tmp_path / "printed.yaml")) == configured(*flags)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--set", "nonsense=1"), "nonsense"),
        (("--gamma", "99"), "speculation.max_draft_tokens must be in [0, 64], got 99 (--gamma)"),
        (("--set", "target.num_replicas=0"), "must be at least 1, got 0 (--set target.num_replicas=0)"),
        (("--target", "/nowhere"), "/nowhere"),
        (("--grpc-port", "99999"), "'--grpc-port': must be 0 (a free one) or in [1, 65535], got 99999"),
        (("--drain-timeout", "-1"), "'--drain-timeout': must be in [0, 86400], got -1.0"),
        (("--config", "/nowhere.yaml"), "/nowhere.yaml"),
        (("--grpc-port", "8000"), "--http-port 8000 is --grpc-port, too: give each its own, or 0 for any"),
        (("--host", "nowhere"), "--host nowhere cannot be used"),
        (("--host", "203.0.113.1"), "--host 203.0.113.1 cannot be used"),
        (("--speculation.guessers", "draft"), "speculation.guessers: Input should be a list, got 'draft'"),
    ],
)
def test_what_keeps_the_service_from_starting_is_said_in_one_line(argv, problem, capsys):
    assert run("serve", *argv) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert err.count("\n") == 1


FLEET = """
models:
- {model_name: org/large, target: {engine: {model: a}}, shared_draft: small}
- {model_name: other, target: {engine: {model: /b}}}
drafts:
  small: {engine: {model: c}}
orchestrator: {json_logs: true}
"""


def test_a_file_of_several_models_is_printed_as_one_that_says_the_same(tmp_path, capsys):
    (tmp_path / "fleet.yaml").write_text(FLEET)
    assert run("serve", "--config", str(tmp_path / "fleet.yaml"), "--print-config") == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    fleet = read_fleet(tmp_path / "fleet.yaml")
    assert [each.model_name for each in fleet.models] == ["org/large", "other"]
    assert single_models(fleet)[0].draft.engine.model == str(tmp_path / "c"), "from where the file is"
    assert read_fleet(tmp_path / "printed.yaml") == fleet


@pytest.mark.parametrize(
    ("argv", "change", "problem"),
    [
        ((), ("other", "org/large"), "models must be of different model_name, got ['org/large', 'org/large'] ({}:2)"),
        ((), ("/b}}", "/b}}, limts: {}"), "models.1.limts: there is no such setting ({}:4)"),
        ((), ("draft: small", "draft: smal"), "one of drafts (small), got 'smal' ({})"),
        (("--gamma", "3"), ("", ""), "--gamma: must not be given beside {}, which has several models: set it there"),
        (("--dtype", "bfloat16"), ("", ""), "--dtype: must not be given beside {}"),
        (("--limits.max_sessions", "3"), ("", ""), "--limits.max_sessions: must not be given beside {}"),
    ],
)
def test_what_is_wrong_with_several_models_is_said_in_one_line(tmp_path, capsys, argv, change, problem):
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.replace(*change))
    assert run("serve", "--config", str(file), *argv) == 2
    err = capsys.readouterr().err
    assert problem.format(file) in err
    assert err.count("\n") == 1
