"""The running demo pair as the official openai client meets it, unchanged."""

from __future__ import annotations

import http.client
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import ray
from served import MAX_TRIES

from outrider_client import Client, InvalidRequest, OutriderError, Retry, Unauthenticated

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PROMPT = "def add(a, b):\n    "
MAX_FREE_S = 60.0


def complete(client, **fields):
    extra = {"ignore_eos": True, "return_token_ids": True, **fields.pop("extra_body", {})}
    given = {"model": "outrider-demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    return client.completions.create(**given, extra_body=extra)


def by_grpc(client, **sampling):
    return client.generate(PROMPT, max_tokens=24, ignore_eos=True, **sampling)


def test_output_is_that_of_grpc(client, grpc_client):
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        expected = by_grpc(grpc_client, **sampling)
        choice = complete(client, **sampling).choices[0]
        assert (choice.text, choice.token_ids) == (expected.text, list(expected.token_ids))


def test_a_stream_is_the_whole_and_ends_with_usage(client):
    whole = complete(client, temperature=1, seed=3)
    *pieces, last = complete(client, temperature=1, seed=3, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [token for piece in pieces for token in piece.choices[0].token_ids] == whole.choices[0].token_ids
    assert pieces[-1].choices[0].finish_reason == "length"
    assert pieces[-1].choices[0].outrider["seed"] == 3
    assert last.usage == whole.usage
    assert last.usage.completion_tokens == 24


def test_a_trace_says_who_made_each_token(client, grpc_client):
    asked = {"policy": "static", "max_draft_tokens": 4, "guessers": ["draft"], "trace": True}
    for _ in range(MAX_TRIES):
        choice = complete(client, extra_body={"speculation": asked}).choices[0]
        tokens = choice.outrider["tokens"]
        if {token["source"] for token in tokens} == {"draft", "target"}:
            break
    assert [token["id"] for token in tokens] == choice.token_ids
    assert "".join(token["text"] for token in tokens) == choice.text
    num_guessed = sum(token["source"] == "draft" for token in tokens)
    assert 0 < num_guessed <= choice.outrider["speculation"]["accepted_tokens"]
    assert {token["source"] for token in tokens} == {"draft", "target"}
    trace = by_grpc(grpc_client, temperature=0, trace=True).trace
    assert sum(len(call.verified.path) + 1 for call in trace if call.verified is not None) >= 24


def test_a_template_changes_no_token_and_a_bad_one_is_refused_by_its_name(client, grpc_client):
    expected = by_grpc(grpc_client, temperature=0)
    asked = {"guessers": ["template"], "policy": "static", "template": re.escape(expected.text)}
    choices = [complete(client, extra_body={"speculation": asked}).choices[0] for _ in range(2)]
    assert [choice.token_ids for choice in choices] == [list(expected.token_ids)] * 2
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, extra_body={"speculation": {"template": "(a"}})
    assert refused.value.param == "speculation.template"


def test_the_page_and_its_figures(client, guarded):
    connection = http.client.HTTPConnection("localhost", guarded.http_port)
    connection.request("GET", "/")
    page = connection.getresponse()
    assert (page.status, page.read().startswith(b"<!doctype html>")) == (200, True)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    connection.close()
    while not (status := client.get("/outrider/status", cast_to=dict[str, Any])["models"][0])["replicas"]:
        time.sleep(0.1)  # they are counted every two seconds
    assert status["replicas"] == {"target": 1, "draft": 1}
    assert status["control"]["acceptance"]


def test_speculation_changes_nothing_but_its_statistics(client):
    drafted = complete(client, extra_body={"speculation": {"policy": "static", "max_draft_tokens": 4}}).choices[0]
    plain = complete(client, extra_body={"speculation": {"max_draft_tokens": 0}}).choices[0]
    assert drafted.token_ids == plain.token_ids
    assert plain.outrider["speculation"]["drafted_tokens"] == 0


def test_n_samples_are_reproducible_one_by_one(client):
    texts = [choice.text for choice in complete(client, temperature=1, seed=5, n=2).choices]
    assert texts == [choice.text for choice in complete(client, temperature=1, seed=5, n=2).choices]
    three = complete(client, temperature=1, seed=5, n=3).choices
    assert [choice.text for choice in three[:2]] == texts
    assert len({choice.text for choice in three}) == 3
    again = complete(client, temperature=1, seed=three[2].outrider["seed"]).choices[0]
    assert again.text == three[2].text


def test_several_prompts_give_what_each_gives_alone(client):
    prompts = ["import os", "class A:", PROMPT]
    together = complete(client, prompt=prompts, temperature=1, n=2, seed=5)
    alone = [complete(client, prompt=prompt, temperature=1, n=2, seed=5) for prompt in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3, 4, 5]
    expected = [(choice.token_ids, choice.text) for each in alone for choice in each.choices]
    assert [(choice.token_ids, choice.text) for choice in together.choices] == expected
    ids = [choice.prompt_token_ids for choice in together.choices[::2]]
    scored = complete(client, prompt=ids, max_tokens=1, echo=True, logprobs=1).choices
    for choice, prompt in zip(scored, ids, strict=True):
        assert len(choice.logprobs.tokens) == len(prompt) + 1
        starts = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        assert all(choice.text.startswith(token, offset) for token, offset in starts)
    assert together.usage.prompt_tokens == sum(map(len, ids))
    assert together.usage.completion_tokens == 6 * 24
    pieces = complete(client, prompt=prompts, temperature=1, n=2, seed=5, stream=True)
    texts = [""] * 6
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [text for _, text in expected]


def test_an_output_that_nothing_may_follow_is_cut_short_if_it_has_begun(client):
    held = {"guided_regex": "aa(b|c)", "ignore_eos": False}
    words = ["b", "c", "ab", "ac", "aab", "aac"]
    (choice,) = complete(client, extra_body={**held, "bad_words": words}).choices
    assert (choice.text, choice.finish_reason) == ("aa", "length")
    assert choice.outrider["problem"].startswith("bad_words: forbid every token")
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, extra_body={**held, "bad_words": [*words, "a", "aa"]})
    assert refused.value.param == "bad_words"


def test_n_samples_by_grpc_are_those_by_http(client, grpc_client):
    expected = [choice.token_ids for choice in complete(client, temperature=1, seed=5, n=3).choices]
    completion = by_grpc(grpc_client, temperature=1.0, seed=5, n=3)
    assert [list(sample.token_ids) for sample in completion.samples] == expected
    assert completion.usage.completion_tokens == 3 * 24
    alone = by_grpc(grpc_client, temperature=1.0, seed=completion.samples[2].finish.seed)
    assert list(alone.token_ids) == expected[2]
    seen = [list(sample.token_ids)[:cut] for sample, cut in zip(completion.samples, (24, 5, 0), strict=True)]
    rest = by_grpc(grpc_client, temperature=1.0, seed=5, n=3, resume_samples=seen)
    assert [own + list(sample.token_ids) for own, sample in zip(seen, rest.samples, strict=True)] == expected


@pytest.mark.parametrize("temperature", [0, 1])
def test_masks_hold_drafted_or_not_by_both_languages(client, grpc_client, temperature):
    free = by_grpc(grpc_client, temperature=float(temperature), seed=5)
    allowed = sorted({*free.token_ids, *range(100, 200)})
    words = [list(free.token_ids[2:4]), [free.token_ids[6]]]
    masks = {"allowed_token_ids": allowed, "bad_word_ids": words, "bad_words": ["return"]}
    outputs = [
        complete(client, temperature=temperature, seed=5, extra_body={**masks, "speculation": speculation}).choices[0]
        for speculation in ({"max_draft_tokens": 0}, {"policy": "static_tree", "max_draft_tokens": 4})
    ]
    masked = by_grpc(grpc_client, temperature=float(temperature), seed=5, **masks)
    assert outputs[0].token_ids == outputs[1].token_ids == list(masked.token_ids) != list(free.token_ids)
    assert "return" not in masked.text
    assert set(masked.token_ids) <= set(allowed) - {words[1][0]}
    assert tuple(words[0]) not in set(pairwise(masked.token_ids))


def test_a_chat_streamed_and_whole(client):
    given = {"model": "outrider-demo", "messages": [{"role": "user", "content": "add two numbers"}]}
    given |= {"temperature": 0, "max_completion_tokens": 16}
    whole = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    stream = client.chat.completions.create(**given, stream=True)
    text = "".join(piece.choices[0].delta.content for piece in stream)
    assert text == whole.choices[0].message.content
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries), "greedy"
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(text)


def test_output_is_held_to_a_schema(client):
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "maximum": 130, "minimum": 0},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    given = {
        "model": "outrider-demo",
        "messages": [{"role": "user", "content": "a person"}],
        "temperature": 1,
        "seed": 3,
    }
    given["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": person},
    }
    choice = client.chat.completions.create(**given, max_completion_tokens=100).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), person)
    plain = client.chat.completions.create(**given, extra_body={"speculation": {"max_draft_tokens": 0}})
    assert plain.choices[0].message.content == choice.message.content
    extra = {"ignore_eos": False, "guided_choice": ["yes", "no", "perhaps"]}
    texts = {each.text for each in complete(client, temperature=1, n=4, extra_body=extra).choices}
    assert texts <= {"yes", "no", "perhaps"}
    for fields, param in (
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, extra_body={"ignore_eos": False, **fields})
        assert refused.value.param == param


def test_logprobs_of_a_completion(client):
    logprobs = complete(client, logprobs=1).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 24
    assert all(
        next(iter(top.values())) == own for top, own in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )


def test_a_prompt_is_scored_the_same_by_both_languages_whatever_is_in_the_cache(client, grpc_client):
    complete(client)  # so that others could begin with it
    scores = by_grpc(grpc_client, temperature=0, prompt_logprobs=2)
    choice = complete(client, echo=True, logprobs=2).choices[0]
    num_prompt = scores.usage.prompt_tokens
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[:num_prompt] == [None, *(each.logprob for each in scores.prompt_logprobs)]
    assert len(scores.prompt_logprobs) == num_prompt - 1
    assert choice.token_ids == list(scores.token_ids) == complete(client).choices[0].token_ids
    # What follows a prompt is scored alike as output and as prompt.
    output = by_grpc(grpc_client, temperature=0, logprobs=0)
    longer = grpc_client.tokenize(PROMPT) + output.token_ids
    as_prompt = grpc_client.generate(token_ids=longer, max_tokens=1, prompt_logprobs=0).prompt_logprobs[
        num_prompt - 1 :
    ]
    assert [each.logprob for each in as_prompt] == pytest.approx([each.logprob for each in output.logprobs], abs=1e-4)


def test_models(client):
    (listed,) = client.models.list().data
    assert client.models.retrieve("outrider-demo") == listed


def test_refusals_are_the_client_s_own_errors(client):
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        complete(client, model="another")
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model="outrider-demo", input="x")
    with pytest.raises(openai.AuthenticationError):
        complete(client.with_options(api_key="wrong"))
    with pytest.raises(openai.InternalServerError) as late:
        complete(client, max_tokens=1500, extra_body={"timeout_s": 0.05})
    assert late.value.status_code == 504


def test_errors_and_logs_name_their_request_and_no_log_has_a_prompt(client, grpc_client):
    marker, trace = "nobody_s_business", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    named = {"x-request-id": "by-http-1", "traceparent": trace}
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, prompt=marker, stop=[marker] * 99, extra_headers=named)
    headers = bad.value.response.headers
    assert (headers["x-request-id"], headers["traceparent"], bad.value.body["request_id"]) == (
        "by-http-1",
        trace,
        "by-http-1",
    )
    with pytest.raises(InvalidRequest) as wrong:
        grpc_client.generate(marker, stop=[marker] * 99, request_id="by-grpc-1")
    assert wrong.value.request_id == "by-grpc-1"
    assert by_grpc(grpc_client, request_id="by-grpc-2", stop=[marker]).request_id == "by-grpc-2"
    complete(client, prompt=marker, extra_headers={"x-request-id": "by-http-2"})
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    text = "".join(file.read_text(errors="replace") for file in logs.glob("**/*") if file.is_file())
    assert marker not in text
    for name in ("by-http-1", "by-http-2", "by-grpc-1", "by-grpc-2"):
        assert any(name in line and ("OK" in line or "INVALID" in line) for line in text.splitlines()), name


def test_what_is_too_long_is_refused_whoever_sends_it(guarded):
    """Before anybody asks for a token: what is read of a stranger is bounded."""
    with Client(guarded.address, retry=Retry(max_retries=0)) as stranger:
        with pytest.raises(Unauthenticated):
            stranger.generate(PROMPT)
        with pytest.raises(InvalidRequest, match="bytes long"):
            stranger.generate("x" * 7_000_000)
        with pytest.raises(OutriderError, match="larger than max"):
            stranger.generate("x" * 50_000_000)


def test_a_body_that_is_too_long_is_refused_before_it_is_read(guarded):
    connection = http.client.HTTPConnection("localhost", guarded.http_port, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", str(2**40))
    connection.endheaders()
    reply = connection.getresponse()
    assert reply.status == 413
    assert json.load(reply)["error"]["param"] == "body"
    connection.close()


def num_sessions(grpc_client):
    return grpc_client.model_info().control.sessions


def wait_until_free(grpc_client):
    end_s = time.monotonic() + MAX_FREE_S
    while num_sessions(grpc_client) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert num_sessions(grpc_client) == 0


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_client_that_goes_away_frees_its_sessions(client, grpc_client, num_samples):
    stream = complete(client, max_tokens=1500, temperature=1, n=num_samples, stream=True)
    next(iter(stream))
    assert num_sessions(grpc_client) == num_samples
    stream.close()
    wait_until_free(grpc_client)


def test_what_there_is_no_place_for_is_refused_with_a_time_to_come_back(client, grpc_client, guarded):
    streams = [complete(client, max_tokens=1500, stream=True) for _ in range(guarded.max_sessions)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client)
    assert int(refused.value.response.headers["retry-after-ms"]) >= 500, "a forecast, and half a second at least"
    for stream in streams:
        stream.close()
    wait_until_free(grpc_client)


def test_a_slow_reader_loses_nothing(client):
    whole = complete(client, temperature=1, seed=11, max_tokens=200)
    token_ids = []
    for piece in complete(client, temperature=1, seed=11, max_tokens=200, stream=True):
        token_ids += piece.choices[0].token_ids
        time.sleep(0.01)
    assert token_ids == whole.choices[0].token_ids
