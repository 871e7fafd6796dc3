"""Every field of a body arrives, and every bad value is refused by the name that the body has for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from core.config import EngineConfig, Limits, ServiceConfig, SpeculationConfig, TargetConfig
from core.errors import InvalidRequest
from core.records import Grammar, GrammarKind, ModelInfo, Sampling, Verification
from deploy.api import Served, sample_seed
from deploy.http.failures import parse
from deploy.http.openai import ChatBody, CompletionBody
from deploy.http.translate import to_requests
from tests.vocabularies import as_product, byte_level

TOKENIZER = as_product(byte_level(), "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
VOCAB = TOKENIZER.vocab_size
EOS = 1
CONTEXT = 100
INFO = ModelInfo("target", "Llama", "float32", "cpu", 0, VOCAB, CONTEXT, 10_000, (EOS,))
CONFIG = ServiceConfig(
    TargetConfig(EngineConfig("/target")),
    limits=Limits(
        max_sessions=5,
        max_stop_strings=2,
        max_stop_chars=5,
        max_stop_token_ids=3,
        max_logit_bias=2,
        max_logprobs=4,
        max_scored_tokens=50,
    ),
)
NOW = 1000.0
HELLO = [{"role": "user", "content": "hi"}]


def served(defaults=None, config=CONFIG):
    return Served(INFO, None, TOKENIZER, defaults or Sampling(), config)


def requests_of(kind, data, defaults=None):
    body = parse(kind, data if isinstance(data, bytes) else json.dumps(data).encode())
    return to_requests(body, served(defaults), NOW, "mine")


def completion(**fields):
    return requests_of(CompletionBody, {"prompt": "say", **fields})


def chat(**fields):
    return requests_of(ChatBody, {"messages": HELLO, **fields})


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


# What is accepted


@pytest.mark.parametrize("make", [completion, chat])
def test_a_bare_body_takes_every_default(make):
    (request,) = make()
    assert request.sampling == Sampling(seed=request.sampling.seed, suppressed_ids=(EOS,))
    assert request.max_tokens == CONTEXT - len(request.prompt)
    assert (request.verification, request.max_draft_tokens, request.policy) == (Verification.COUPLED, None, None)
    assert (request.stop, request.stop_token_ids, request.num_logprobs, request.deadline) == (
        (),
        frozenset(),
        None,
        None,
    )
    assert (request.ignore_eos, request.include_stop, request.pipelining) == (False, False, None)
    assert request.request_id == "mine"


@pytest.mark.parametrize("make", [completion, chat])
def test_every_field_arrives(make):
    (request,) = make(
        max_tokens=20,
        temperature=0.5,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1.5,
        logit_bias={"5": 3, "6": -100},
        seed=2**64 - 1,
        stop=["a", "b"],
        top_k=3,
        min_p=0.25,
        repetition_penalty=2.0,
        allowed_token_ids=[9, 7, 7],
        bad_words=["a"],
        bad_word_ids=[[7, 8]],
        min_tokens=4,
        ignore_eos=True,
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        speculation={
            "max_draft_tokens": 3,
            "verification": "block",
            "policy": "static",
            "pipelining": False,
            "guessers": ["prompt_lookup"],
        },
        timeout_s=2.5,
    )
    assert request.sampling == Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        logit_bias=((5, 3.0), (6, -100.0)),
        min_tokens=4,
        suppressed_ids=(7,),
        allowed_token_ids=(7, 9),
        bad_words=(ids_of("a"), (7, 8)),
        seed=2**64 - 1,
    )
    assert (request.max_tokens, request.stop, request.stop_token_ids) == (20, ("a", "b"), frozenset({7}))
    assert (request.ignore_eos, request.include_stop, request.deadline) == (True, True, NOW + 2.5)
    assert (request.verification, request.max_draft_tokens) == (Verification.BLOCK, 3)
    assert (request.policy, request.pipelining, request.guessers) == ("static", False, ("prompt_lookup",))


def test_a_template_is_taken_and_holds_the_output_to_nothing():
    body = parse(CompletionBody, b'{"prompt": "say", "speculation": {"template": "Dear .*,"}}')
    (request,) = to_requests(body, served(), NOW, "mine")
    assert (request.template, request.grammar) == (Grammar(GrammarKind.REGEX, "Dear .*,"), None)


@pytest.mark.parametrize(
    "fields",
    [{"store": False}, {"store": False, "speculation": {"learning": True}}, {"speculation": {"learning": False}}],
)
def test_a_request_that_may_not_be_stored_may_not_be_learnt_from(fields):
    for of_one in (completion, chat):
        (request,) = of_one(**fields)
        assert request.learning is False


@pytest.mark.parametrize("fields", [{}, {"store": True}, {"store": None}])
def test_what_says_nothing_of_learning_leaves_it_to_the_service(fields):
    (request,) = chat(**fields)
    assert request.learning is None


def test_a_draft_temperature_is_taken():
    body = parse(CompletionBody, b'{"prompt": "say", "speculation": {"draft_temperature": 0.5}}')
    (request,) = to_requests(body, served(), NOW, "mine")
    assert request.draft_temperature == 0.5


def test_a_relaxed_rule_is_taken_where_the_service_allows_it():
    config = replace(CONFIG, speculation=SpeculationConfig(allow_relaxed=True))
    body = parse(
        CompletionBody, b'{"prompt": "say", "speculation": {"verification": "lenient_coupled", "lenience": 0.5}}'
    )
    (request,) = to_requests(body, served(config=config), NOW, "mine")
    assert (request.verification, request.lenience) == (Verification.LENIENT_COUPLED, 0.5)


@pytest.mark.parametrize("make", [completion, chat])
def test_null_is_the_same_as_no_field(make):
    names = "model n stream stream_options max_tokens temperature top_p seed stop top_k speculation logprobs user"
    (request,) = make(**dict.fromkeys(names.split()))
    assert request.sampling == Sampling(seed=request.sampling.seed, suppressed_ids=(EOS,))


def test_unset_sampling_fields_take_the_model_s_own():
    (request,) = requests_of(CompletionBody, {"prompt": "say", "top_p": 0.5}, Sampling(temperature=0.6, top_p=0.9))
    assert (request.sampling.temperature, request.sampling.top_p) == (0.6, 0.5)


@pytest.mark.parametrize("prompt", ["say", ["say"], list(ids_of("say")), [list(ids_of("say"))]])
def test_a_prompt_is_text_or_ids_or_a_list_of_one(prompt):
    (request,) = completion(prompt=prompt)
    assert request.prompt[-3:] == ids_of("say")[-3:]


def test_a_chat_is_what_the_template_makes_of_it():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answered = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "function_call": None}
    (request,) = chat(messages=[*HELLO, answered, {"role": "user", "content": parts}])
    assert TOKENIZER.decode(request.prompt) == "user:hi;assistant:;user:one\ntwo;"


@pytest.mark.parametrize(
    ("make", "fields", "expected"),
    [
        (completion, {"logprobs": 3}, 3),
        (completion, {"logprobs": 0}, 0),
        (chat, {"logprobs": True}, 0),
        (chat, {"logprobs": True, "top_logprobs": 2}, 2),
        (chat, {"logprobs": False}, None),
    ],
)
def test_both_forms_of_asking_for_logprobs(make, fields, expected):
    assert make(**fields)[0].num_logprobs == expected


@pytest.mark.parametrize(
    "fields", [{"max_completion_tokens": 7}, {"max_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 7}]
)
def test_a_chat_has_two_names_for_its_length(fields):
    assert chat(**fields)[0].max_tokens == 7


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"modalities": ["text"], "reasoning_effort": "none"},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_what_changes_nothing_is_taken(fields):
    assert chat(**fields)


def test_a_developer_is_who_templates_call_the_system():
    (request,) = requests_of(ChatBody, {"messages": [{"role": "developer", "content": "be brief"}, *HELLO]})
    assert TOKENIZER.decode(request.prompt) == "system:be brief;user:hi;"


def test_old_fields_with_their_neutral_values_are_taken():
    assert completion(echo=False, best_of=1, suffix=None)


# Several samples


def test_sample_i_of_n_depends_on_the_seed_and_i_alone():
    seeds = [request.sampling.seed for request in completion(n=4, seed=9)]
    assert seeds[0] == 9
    assert len(set(seeds)) == 4
    assert seeds[:2] == [request.sampling.seed for request in completion(n=2, seed=9, max_tokens=3)]
    assert seeds == [sample_seed(9, index) for index in range(4)]
    assert {sample_seed(8, index) for index in range(1, 4)}.isdisjoint(seeds)


def test_seeds_of_samples_stay_what_they_are():
    """A reply that was given can be made again by a later version."""
    assert [sample_seed(7, index) for index in range(3)] == [7, 705196127747058, 1433124329260914]


def test_samples_differ_in_their_seeds_alone():
    first, second = completion(n=2, seed=9, temperature=0.5)
    assert replace(second, sampling=replace(second.sampling, seed=9)) == first


# What is refused

BOTH = [
    ({"n": 0}, "n"),
    ({"n": 6}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 1.5}, "n"),
    ({"model": 3}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 101}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 0.0001}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": [1]}, "top_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias[5]"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias"),
    ({"logit_bias": [[5, 1]]}, "logit_bias"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a", "b", "c"]}, "stop"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", "123456"]}, "stop[1]"),
    ({"stop": 7}, "stop"),
    ({"stop": ["a", 7]}, "stop"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0.05}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": "5"}, "allowed_token_ids"),
    ({"allowed_token_ids": [5, "6"]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [5, True]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [5] * 5000}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "bad_word_ids": [[5]]}, "allowed_token_ids"),
    ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x", 7]}, "bad_words[1]"),
    ({"bad_words": ["x" * 100_000]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_word_ids": [7]}, "bad_word_ids[0]"),
    ({"bad_word_ids": [[]]}, "bad_word_ids[0]"),
    ({"bad_word_ids": [[7], [7, VOCAB]]}, "bad_word_ids[1][1]"),
    ({"bad_word_ids": [[7, -1]]}, "bad_word_ids[0][1]"),
    ({"bad_word_ids": [[7] * 65]}, "bad_word_ids[0]"),
    ({"bad_word_ids": [["x"]]}, "bad_word_ids[0][0]"),
    ({"n": 0}, "n"),
    ({"priority": 2**31}, "priority"),
    ({"priority": -(2**31) - 1}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"service_tier": "scale"}, "service_tier"),
    ({"service_tier": "flex", "priority": 1}, "priority"),
    ({"stop_token_ids": [1, 2, 3, 4]}, "stop_token_ids"),
    ({"stop_token_ids": [1, VOCAB]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 4}, "stop_token_ids"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"timeout_s": 86_401}, "timeout_s"),
    ({"timeout_s": float("nan")}, "timeout_s"),
    ({"speculation": 4}, "speculation"),
    ({"speculation": {"gamma": 4}}, "speculation.gamma"),
    ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
    ({"speculation": {"max_draft_tokens": 65}}, "speculation.max_draft_tokens"),
    ({"speculation": {"max_draft_tokens": "4"}}, "speculation.max_draft_tokens"),
    ({"speculation": {"verification": "lenient"}}, "speculation.verification"),
    ({"speculation": {"verification": "typical"}}, "speculation.verification"),
    ({"speculation": {"lenience": 0.5}}, "speculation.lenience"),
    ({"speculation": {"lenience": "little"}}, "speculation.lenience"),
    ({"speculation": {"draft_temperature": 0}}, "speculation.draft_temperature"),
    ({"speculation": {"draft_temperature": "warm"}}, "speculation.draft_temperature"),
    ({"speculation": {"template": "(a"}}, "speculation.template"),
    ({"speculation": {"template": ""}}, "speculation.template"),
    ({"speculation": {"template": 4}}, "speculation.template"),
    ({"speculation": {"template": "a" * 70_000}}, "speculation.template"),
    ({"speculation": {"policy": "brave"}}, "speculation.policy"),
    ({"speculation": {"pipelining": 1}}, "speculation.pipelining"),
    ({"speculation": {"guessers": ["draft", "oracle"]}}, "speculation.guessers[1]"),
    ({"speculation": {"guessers": [1]}}, "speculation.guessers[0]"),
    ({"speculation": {"guessers": "draft"}}, "speculation.guessers"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"temprature": 1}, "temprature"),
]
COMPLETION = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt"),
    ({"prompt": [5, "b"]}, "prompt"),
    ({"prompt": [5, True]}, "prompt"),
    ({"prompt": [5, VOCAB]}, "prompt[1]"),
    ({"prompt": [-5]}, "prompt[0]"),
    ({"prompt": [5] * CONTEXT}, "prompt"),
    ({"prompt": "a" * 100_000}, "prompt"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"echo": True, "logprobs": 1, "n": 2}, "n"),
    ({"echo": True, "logprobs": 5}, "logprobs"),
    ({"echo": True, "logprobs": 0, "prompt": [5] * 60}, "logprobs"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 2, "n": 0}, "n"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "prompt_logprobs": 0}, "best_of"),
    ({"best_of": 2, "echo": True, "logprobs": 1}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": HELLO}, "messages"),
]
CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ({"logprobs": 2}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "some"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prompt": "say"}, "prompt"),
]


def named(cases):
    return [pytest.param(*case, id=f"{case[1]}-{index}") for index, case in enumerate(cases)]


def assert_refused(make, fields, param):
    with pytest.raises(InvalidRequest) as raised:
        make(**fields)
    assert raised.value.field == param
    assert "pydantic" not in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(("fields", "param"), named(BOTH))
@pytest.mark.parametrize("make", [completion, chat])
def test_a_bad_value_is_refused_by_its_name(make, fields, param):
    assert_refused(make, fields, param)


@pytest.mark.parametrize(("fields", "param"), named(COMPLETION))
def test_a_bad_value_of_a_completion_is_refused_by_its_name(fields, param):
    assert_refused(completion, fields, param)


@pytest.mark.parametrize(("fields", "param"), named(CHAT))
def test_a_bad_value_of_a_chat_is_refused_by_its_name(fields, param):
    assert_refused(chat, fields, param)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"a":1}{}']
)
def test_what_is_no_body_is_refused(kind, data):
    with pytest.raises(InvalidRequest) as raised:
        parse(kind, data)
    assert raised.value.field in ("body", "messages")


@pytest.mark.parametrize(("kind", "param"), [(CompletionBody, "prompt"), (ChatBody, "messages")])
def test_a_body_without_a_prompt_is_refused(kind, param):
    with pytest.raises(InvalidRequest, match="must be given") as raised:
        parse(kind, b"{}")
    assert raised.value.field == param
