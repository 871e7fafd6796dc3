"""Completions and chats take the fields that users of other servers send, and reply as they expect."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest
from test_http_servicer import CHAT, call, error, events, respond, servicer, usage, whole, with_template
from test_http_translate import CONTEXT, TOKENIZER, chat, completion, ids_of

from core.errors import InvalidRequest, Overloaded
from core.records import Chunk, FinishReason, TokenLogprobs, Usage
from deploy.api.hosted import Hosted, Models
from deploy.clock import MonotonicClock
from deploy.http.openai.offsets import TextOffsets
from deploy.metrics.meters import Meters
from orchestrator.text import IncrementalDetokenizer
from tests.deploy.grpc.rpc import CONFIG, Recorded, Script, greeting, served
from tests.vocabularies import as_product, byte_fallback, byte_level

MESSAGES = [{"role": "user", "content": "say"}]
NUM_TOKENS = len(ids_of("hello") + ids_of(" wor") + ids_of("d"))


class Echo(Script):
    """Answers each prompt with its own last token, and says how many run at once."""

    most = 0

    async def generate(self, request):
        self.requests.append(request)
        self.num_open += 1
        self.most = max(self.most, self.num_open)
        try:
            await asyncio.sleep(0.001)
            found = Usage(len(request.prompt), 1, len(request.prompt) - 1)
            last = request.prompt[-1:]
            yield Chunk(TOKENIZER.decode(last), last, (False,), found, finish_reason=FinishReason.LENGTH)
        finally:
            self.num_open -= 1


def with_limits(script, record=None, **limits):
    config = replace(CONFIG, limits=replace(CONFIG.limits, **limits))
    meters = Meters(record or Recorded(), MonotonicClock().now)
    return servicer(script, models=Models([Hosted(script, served(config), meters)]))


# Lists of prompts


@pytest.mark.parametrize("prompts", [["xa", "xb", "xc"], [list(ids_of(f"x{each}")) for each in "abc"]])
async def test_each_of_several_prompts_has_its_own_choices(prompts):
    record = Recorded()
    _, reply = await whole(with_limits(Echo(), record), call(prompt=prompts, n=2, seed=5, return_token_ids=True))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in reply["choices"]] == ["a", "a", "b", "b", "c", "c"]
    seeds = [choice["outrider"]["seed"] for choice in reply["choices"]]
    assert seeds == seeds[:2] * 3
    ids = [choice["prompt_token_ids"] for choice in reply["choices"]]
    assert [TOKENIZER.decode(each)[-2:] for each in ids] == ["xa", "xa", "xb", "xb", "xc", "xc"]
    num_prompt = sum(len(each) for each in ids[::2])
    assert reply["usage"] == usage(num_prompt, 6, num_prompt - 3)
    assert record.by_label("request_success_total") == {"length": 6}


async def test_a_stream_of_several_prompts_tells_them_apart_and_sums_their_usage():
    given = {"prompt": ["xa", "xb"], "n": 2, "stream": True, "stream_options": {"include_usage": True}, "echo": True}
    *pieces, last = await events(with_limits(Echo()), call(**given))
    texts = {piece["choices"][0]["index"]: piece["choices"][0]["text"] for piece in pieces}
    assert texts == {0: "xaa", 1: "xaa", 2: "xbb", 3: "xbb"}
    num_prompt = len(TOKENIZER.encode("xa")) + len(TOKENIZER.encode("xb"))
    assert last["usage"] == usage(num_prompt, 4, num_prompt - 2)


@pytest.mark.parametrize("limits", [{"max_sessions": 5}, {"max_sessions_per_caller": 5}])
async def test_more_prompts_than_there_are_places_wait_for_each_other(limits):
    script = Echo()
    _, reply = await whole(with_limits(script, **limits), call(prompt=["a"] * 9, n=2))
    assert len(reply["choices"]) == 18
    assert script.most == 4


async def test_a_prompt_that_fails_fails_the_call_and_frees_the_others():
    class OneFails(Script):
        async def generate(self, request):
            if request.prompt[-1:] == ids_of("b"):
                raise Overloaded("full", 1.0)
            async for chunk in super().generate(request):
                yield chunk

    script = OneFails(is_endless=True)
    head, _ = await error(servicer(script), call(prompt=["a", "b", "c"]))
    assert (head.status, script.num_open) == (429, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", ""]}, None),
        ({"prompt": ["a", "x" * 500]}, "prompt[1]"),
        ({"prompt": [[5], []]}, "prompt[1]"),
        ({"prompt": [[5], [6, TOKENIZER.vocab_size]]}, "prompt[1][1]"),
        ({"prompt": [[5], [6, -1]]}, "prompt[1][1]"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a", ["b"]]}, "prompt"),
        ({"prompt": [[[5]]]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": ["a", "b"], "max_tokens": 1000}, "max_tokens"),
    ],
)
def test_the_prompt_that_is_wrong_is_named(fields, param):
    if param is None:
        assert len(completion(**fields)) == 2, "an empty text has the token that begins a prompt"
        return
    with pytest.raises(InvalidRequest) as refused:
        completion(**fields)
    assert refused.value.field == param


# Log probabilities and offsets


def scored(text, *, is_last=True):
    ids = ids_of(text)
    logprobs = tuple(TokenLogprobs(-1.0 - index, ((9, -0.5), (8, -0.75))) for index in range(len(ids)))
    reason = FinishReason.LENGTH if is_last else None
    return Chunk(text, ids, (True,) * len(ids), Usage(3, len(ids)), logprobs, reason)


@pytest.mark.parametrize(("asked", "expected"), [(0, 1), (1, 2), (2, 3)])
async def test_the_actual_token_is_among_the_likeliest(asked, expected):
    given = {"prompt": list(ids_of("ab")), "logprobs": asked, "echo": True}
    script = Script(replace(scored("xy"), prompt_logprobs=(TokenLogprobs(-3.0, ((9, -0.5), (8, -0.75))),)))
    _, reply = await whole(servicer(script), call(**given))
    logprobs = reply["choices"][0]["logprobs"]
    lists = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, top in zip(*lists, strict=True):
        if logprob is None:
            assert top is None
        else:
            assert top[token] == logprob
            assert len(top) == expected


@pytest.mark.parametrize("vocabulary", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["abc", "a 🙂🙃b", "세계 naïve", "\n\n x"])
def test_each_offset_points_to_where_its_token_begins(vocabulary, text):
    tokenizer = as_product(vocabulary())
    ids = [*tokenizer.encode(text, add_special_tokens=False)]
    special = next(token_id for token_id in range(5) if tokenizer.is_special(token_id))
    ids = [special, *ids[:2], special, *ids[2:], special]
    shown = IncrementalDetokenizer(tokenizer)
    whole_text = shown.push(ids).text + shown.finish().text
    offsets = TextOffsets(tokenizer)
    begun, found = IncrementalDetokenizer(tokenizer), []
    for token_id in ids:
        found.append(offsets.of(token_id))
        own = begun.push([token_id]).text
        assert whole_text[found[-1] :].startswith(own)
    assert found == sorted(found)
    assert found[-1] <= len(whole_text)
    assert found[0] == 0


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_echo", [False, True])
async def test_offsets_count_from_the_beginning_of_the_prompt(is_stream, is_echo):
    emoji = "🙂é"
    parts = [scored("ab", is_last=False), scored(emoji, is_last=False), scored("c")]
    count = len(TOKENIZER.encode("say 🙂")) - 1
    parts[0] = replace(parts[0], prompt_logprobs=(TokenLogprobs(-1.0),) * count if is_echo else ())
    given = {"prompt": "say 🙂", "logprobs": 1, "echo": is_echo}
    if is_stream:
        pieces = [piece["choices"][0] for piece in await events(servicer(Script(*parts)), call(stream=True, **given))]
    else:
        pieces = (await whole(servicer(Script(*parts)), call(**given)))[1]["choices"]
    text = ("" if is_echo else "say 🙂") + "".join(piece["text"] for piece in pieces)
    tokens = [token for piece in pieces for token in piece["logprobs"]["tokens"]]
    offsets = [offset for piece in pieces for offset in piece["logprobs"]["text_offset"]]
    assert text == f"say 🙂ab{emoji}c"
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if token.startswith("bytes:"):
            assert text[offset] in " 🙂é"
        elif not token.startswith("<|"):
            assert text[offset:].startswith(token), (token, offset)
    assert offsets[0] == (0 if is_echo else 5)


async def test_a_token_that_a_stop_string_has_cut_off_stands_at_the_end():
    chunk = replace(scored("abc"), text="a", finish_reason=FinishReason.STOP, matched_stop="bc")
    _, reply = await whole(servicer(Script(chunk)), call(logprobs=0))
    assert max(reply["choices"][0]["logprobs"]["text_offset"]) <= len("saya")


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_the_prompt_s_own_log_probabilities_are_as_vllm_has_them(path):
    given = {"prompt": list(ids_of("ab"))} if path != CHAT else {"messages": [{"role": "user", "content": "b"}]}
    num_scored = 1
    chunk = replace(greeting()[0], prompt_logprobs=(TokenLogprobs(-3.0, ((9, -0.5), (8, -0.75))),) * num_scored)
    script = Script(chunk, greeting()[1])
    http = with_template(script)
    if path == CHAT:
        given["messages"][0]["content"] = "".join(TOKENIZER.decode([each]) for each in ids_of("ab"))
    _, reply = await whole(http, call(path, prompt_logprobs=2, **given))
    (request,) = script.requests
    assert request.num_prompt_logprobs == 2
    found = (reply if path == CHAT else reply["choices"][0])["prompt_logprobs"]
    assert found[0] is None
    actual = found[1][str(request.prompt[1])]
    assert actual == {"logprob": -3.0, "rank": None, "decoded_token": "b"}
    assert [found[1][each]["rank"] for each in ("9", "8")] == [1, 2]
    first, *others = await events(http, call(path, prompt_logprobs=2, stream=True, **given))
    assert (first if path == CHAT else first["choices"][0])["prompt_logprobs"] == found
    assert "prompt_logprobs" not in json.dumps(others)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("role", ["assistant", "user"])
async def test_a_chat_repeats_what_the_assistant_has_said_last_if_asked(is_stream, role):
    given = {"messages": [*MESSAGES, {"role": role, "content": "well, "}], "echo": True, "stream": is_stream}
    http = with_template(Script(*greeting()))
    if is_stream:
        pieces = [piece["choices"][0]["delta"] for piece in await events(http, call(CHAT, **given))]
        text = "".join(piece.get("content", "") for piece in pieces)
    else:
        text = (await whole(http, call(CHAT, **given)))[1]["choices"][0]["message"]["content"]
    assert text == ("well, " if role == "assistant" else "") + "hello word"


# What else other servers' callers send


@pytest.mark.parametrize("is_stream", [False, True])
async def test_token_ids_of_prompt_and_output_are_returned(is_stream):
    script = Script(*greeting())
    for path in ("/v1/completions", CHAT):
        http = with_template(script)
        given = {"messages": MESSAGES} if path == CHAT else {}
        if is_stream:
            first, *others = await events(http, call(path, stream=True, return_token_ids=True, **given))
            assert "prompt_token_ids" not in json.dumps(others)
        else:
            _, first = await whole(http, call(path, return_token_ids=True, **given))
        holder = first if path == CHAT else first["choices"][0]
        assert tuple(holder["prompt_token_ids"]) == script.requests[-1].prompt
        assert first["choices"][0]["token_ids"]


async def test_a_reply_names_what_computed_it():
    plain = (await whole(servicer(Script(*greeting())), call()))[1]["system_fingerprint"]
    assert plain.startswith("fp_")
    pieces = await events(with_template(Script(*greeting())), call(CHAT, messages=MESSAGES, stream=True))
    assert {piece["system_fingerprint"] for piece in pieces} != {plain}, "another tokenizer's"
    pair = served()
    other = replace(pair, target=replace(pair.target, digest="sha256:other"))
    models = Models([Hosted(Script(*greeting()), other, Meters(Recorded(), MonotonicClock().now))])
    assert (await whole(servicer(None, models=models), call()))[1]["system_fingerprint"] != plain


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}])
async def test_a_piece_without_anything_to_tell_is_left_out(path, fields):
    first, last = greeting()
    silent = replace(first, text="", logprobs=())
    given = {"messages": MESSAGES} if path == CHAT else {}
    script = Script(silent, silent, first, silent, replace(last, text=""))
    pieces = await events(with_template(script), call(path, stream=True, **fields, **given))
    assert len(pieces) == (5 if fields else 3)
    choices = [piece["choices"][0] for piece in pieces]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("make", [completion, chat])
def test_numbers_that_stand_for_unset_are_taken_so(make):
    assert make(top_k=-1)[0].sampling.top_k == 0
    assert make(seed=-2)[0].sampling.seed == make(seed=-2)[0].sampling.seed == 2**53 - 2
    drawn = {make(seed=-1)[0].sampling.seed for _ in range(20)} | {make()[0].sampling.seed for _ in range(20)}
    assert len(drawn) == 40
    assert max(drawn) < 2**53


@pytest.mark.parametrize(("most", "kept"), [(2, 2), (1000, None), (-1, CONTEXT - 10)])
def test_a_prompt_is_cut_to_its_last_tokens(most, kept):
    prompt = "ab " * 60 if most == -1 else "abcdefgh"
    ids = TOKENIZER.encode(prompt)
    assert most != -1 or len(ids) > CONTEXT
    (request,) = completion(prompt=prompt, truncate_prompt_tokens=most, max_tokens=10)
    assert request.prompt == (ids if kept is None else ids[-kept:])
    (request,) = completion(prompt=list(ids), truncate_prompt_tokens=most, max_tokens=10)
    assert request.prompt == (ids if kept is None else ids[-kept:])
    (request,) = chat(truncate_prompt_tokens=2)
    assert TOKENIZER.decode(request.prompt) == "i;"


async def test_what_is_repeated_of_a_cut_prompt_is_what_is_left_of_it():
    _, reply = await whole(servicer(Script(*greeting())), call(truncate_prompt_tokens=1, echo=True))
    assert reply["choices"][0]["text"] == TOKENIZER.decode(ids_of("say")[-1:]) + "hello word"


@pytest.mark.parametrize("most", [0, -2])
def test_a_prompt_cannot_be_cut_to_nothing(most):
    with pytest.raises(InvalidRequest, match=r"^truncate_prompt_tokens: must be -1"):
        completion(truncate_prompt_tokens=most)


# Errors


@pytest.mark.parametrize(
    "fields", [{"prompt": "x" * 4000}, {"prompt": [5] * 300}, {"prompt": "ab " * 120}, {"max_tokens": 300}]
)
async def test_a_context_that_is_too_long_is_told_in_the_words_that_gateways_look_for(fields):
    head, told = await error(servicer(Script()), call(**fields))
    assert (head.status, told["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 200 tokens." in told["message"]
    if fields != {"prompt": "x" * 4000}:  # which is not tokenized
        total, num_prompt, num_output = map(
            int, re.search(r"requested (\d+) tokens \((\d+) in the messages, (\d+) in the", told["message"]).groups()
        )
        assert total == num_prompt + num_output > 200


@pytest.mark.parametrize("beside", [{"ignore_eos": True}, {"allowed_token_ids": [5]}])
def test_an_error_speaks_of_the_body_s_own_fields(beside):
    with pytest.raises(InvalidRequest) as refused:
        completion(guided_choice=["a"], **beside)
    assert "beside guided_choice" in refused.value.problem
    assert "structured_output" not in str(refused.value)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (InvalidRequest("structured_output", "cannot be followed: x"), "guided_regex: cannot be followed: x"),
        (InvalidRequest("sampling.bad_words", "forbid all"), "bad_word_ids: forbid all"),
    ],
)
async def test_an_output_that_is_cut_short_says_why_by_the_body_s_fields(is_stream, problem, told):
    first, last = greeting()
    last = Chunk("", (), (), last.usage, finish_reason=FinishReason.LENGTH, problem=problem)
    given = call(stream=is_stream, guided_regex="a+", bad_word_ids=[[5, 6]])
    if is_stream:
        *_, reply = await events(servicer(Script(first, last)), given)
    else:
        _, reply = await whole(servicer(Script(first, last)), given)
    (choice,) = reply["choices"]
    assert (choice["finish_reason"], choice["outrider"]["problem"]) == ("length", told)


@pytest.mark.parametrize("value", [True, None])
def test_what_changes_nothing_is_taken(value):
    assert completion(skip_special_tokens=value) and chat(skip_special_tokens=value)  # noqa: PT018


def test_what_would_change_something_is_not():
    with pytest.raises(InvalidRequest, match=r"^skip_special_tokens: is not supported"):
        completion(skip_special_tokens=False)


async def test_nothing_but_an_event_s_bytes_reach_a_reader():
    """Omitted text does not come as an empty piece either."""
    silent = replace(greeting()[0], text="")
    _, body = await respond(servicer(Script(greeting()[0], silent, greeting()[1])), call(stream=True))
    assert body.count(b"data: ") == 3
