from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from core.config import EngineConfig, Limits, ServiceConfig, SpeculationConfig, TargetConfig
from core.errors import CheckpointError, InvalidRequest
from core.ranges import ranges_of
from core.records import GIVEN_SAMPLING, GenerationRequest, Grammar, GrammarKind, ModelInfo, Sampling, Verification
from deploy.api import Served, sample_seed
from deploy.api.checks import bad_words
from deploy.api.request import sampling_defaults
from deploy.grpc.translate import to_requests
from protos.outrider.v1 import generation_pb2 as pb
from tests.vocabularies import as_product, byte_level

TOKENIZER = as_product(byte_level(), "{{ messages[0].content }}")
VOCAB = TOKENIZER.vocab_size
EOS = 1
CONTEXT = 100
INFO = ModelInfo("target", "Llama", "float32", "cpu", 0, VOCAB, CONTEXT, 10_000, (EOS,))
CONFIG = ServiceConfig(
    TargetConfig(EngineConfig("/target")),
    model_name="pair",
    limits=Limits(max_stop_strings=2, max_stop_chars=5, max_stop_token_ids=3, max_logit_bias=2, max_logprobs=4),
)
NOW = 1000.0


def translate(
    message: pb.GenerateRequest,
    *,
    defaults: Sampling | None = None,
    config: ServiceConfig = CONFIG,
    info: ModelInfo = INFO,
) -> GenerationRequest:
    (request,) = to_requests(message, served(info=info, defaults=defaults, config=config), NOW)
    return request


def served(
    tokenizer: Any = TOKENIZER,
    *,
    defaults: Sampling | None = None,
    config: ServiceConfig = CONFIG,
    info: ModelInfo = INFO,
) -> Served:
    return Served(info, None, tokenizer, defaults or Sampling(), config)


def message(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"token_ids": pb.TokenIds(ids=[5, 6, 7]), **fields})


def sampling(**fields: Any) -> pb.GenerateRequest:
    return message(sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return message(stopping=pb.StoppingParams(**fields))


# Several samples


def samples(**fields: Any) -> list[GenerationRequest]:
    return to_requests(message(**fields), served(), NOW)


def test_a_call_has_no_more_samples_than_its_caller_may_have_places():
    config = replace(CONFIG, limits=replace(CONFIG.limits, max_sessions_per_caller=2))
    assert len(to_requests(message(n=2), served(config=config), NOW)) == 2
    with pytest.raises(InvalidRequest, match="at most 2: this caller's session limit") as caught:
        to_requests(message(n=3), served(config=config), NOW)
    assert caught.value.field == "n"


SEEDED = pb.SamplingParams(seed=5)


def test_sample_i_depends_on_the_seed_and_i_alone():
    three, two = samples(n=3, sampling=SEEDED), samples(n=2, sampling=SEEDED)
    assert [each.sampling.seed for each in three] == [sample_seed(5, index) for index in range(3)]
    assert two == [replace(each, request_id=own.request_id) for each, own in zip(three, two, strict=False)]


def test_each_sample_resumes_where_it_was():
    outputs = [pb.TokenIds(ids=ids) for ids in ([3, 4], [], [5])]
    requests = samples(n=3, sampling=SEEDED, resume_samples=outputs)
    assert [each.resume_tokens for each in requests] == [(3, 4), (), (5,)]


WRONG_SAMPLES = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2**32 - 1}, "n"),
    ({"n": 2, "resume_token_ids": [3]}, "resume_token_ids"),
    ({"n": 2, "resume_samples": [pb.TokenIds()]}, "resume_samples"),
    ({"resume_samples": [pb.TokenIds(), pb.TokenIds()]}, "resume_samples"),
    ({"resume_samples": [pb.TokenIds(ids=[3])], "resume_token_ids": [3]}, "resume_samples"),
    ({"n": 2, "resume_samples": [pb.TokenIds(), pb.TokenIds(ids=[VOCAB])]}, "resume_samples[1].ids[0]"),
    ({"n": 2, "resume_samples": [pb.TokenIds(), pb.TokenIds(ids=[3] * CONTEXT)]}, "resume_samples[1].ids"),
]


@pytest.mark.parametrize(("fields", "field"), WRONG_SAMPLES)
def test_what_is_wrong_with_several_samples_is_named(fields, field):
    with pytest.raises(InvalidRequest) as caught:
        samples(sampling=SEEDED, **fields)
    assert caught.value.field == field


def test_a_prompt_is_scored_once_for_all_samples_and_no_longer_one_than_is_allowed():
    assert [each.num_prompt_logprobs for each in samples(n=3, prompt_logprobs=0)] == [0, None, None]
    few = replace(CONFIG, limits=replace(CONFIG.limits, max_scored_tokens=2))
    for wrong, config in (
        ({"prompt_logprobs": 5}, CONFIG),
        ({"prompt_logprobs": 2**32 - 1}, CONFIG),
        ({"prompt_logprobs": 0}, few),
    ):
        with pytest.raises(InvalidRequest) as caught:
            translate(message(**wrong), config=config)
        assert caught.value.field == "prompt_logprobs"


def test_several_samples_resume_by_their_seed():
    with pytest.raises(InvalidRequest, match=r"sampling\.seed"):
        samples(n=2, resume_samples=[pb.TokenIds(), pb.TokenIds(ids=[3])])


def guessers(*names: str) -> pb.GenerateRequest:
    return message(speculation=pb.SpeculationParams(guessers=names))


# What is accepted


def test_a_bare_request_takes_every_default():
    request = translate(message())
    assert request.prompt == (5, 6, 7)
    assert request.max_tokens == CONTEXT - 3
    assert request.sampling == Sampling(seed=request.sampling.seed, suppressed_ids=(EOS,))
    assert (request.verification, request.max_draft_tokens) == (Verification.COUPLED, None)
    assert (request.policy, request.pipelining, request.guessers) == (None, None, ())
    assert (request.stop, request.stop_token_ids, request.ignore_eos, request.include_stop) == (
        (),
        frozenset(),
        False,
        False,
    )
    assert (request.num_logprobs, request.deadline, request.resume_tokens) == (None, None, ())
    assert not request.wants_trace
    assert request.request_id


def test_every_field_arrives():
    request = translate(
        message(
            model="pair",
            request_id="mine",
            sampling=pb.SamplingParams(
                temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=2.0,
                presence_penalty=-1.0, frequency_penalty=1.0, seed=2**64 - 1, logit_bias={9: -100.0, 8: 1.5},
            ),
            stopping=pb.StoppingParams(
                max_tokens=20, min_tokens=2, stop=["a", "b"], stop_token_ids=[9, 8], include_stop=True
            ),
            speculation=pb.SpeculationParams(
                max_draft_tokens=0, verification=pb.VERIFICATION_BLOCK, policy="entropy", pipelining=False, trace=True,
                guessers=["prompt_lookup", "draft"],
            ),
            logprobs=0,
            resume_token_ids=[11, 12],
            timeout_s=2.5,
        )
    )  # fmt: skip
    assert request == GenerationRequest(
        request_id="mine",
        prompt=(5, 6, 7),
        sampling=Sampling(
            temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=2.0, presence_penalty=-1.0,
            frequency_penalty=1.0, seed=2**64 - 1, logit_bias=((8, 1.5), (9, -100.0)), min_tokens=2,
            suppressed_ids=(EOS, 8, 9),
        ),
        max_tokens=20,
        verification=Verification.BLOCK,
        max_draft_tokens=0,
        policy="entropy",
        pipelining=False,
        guessers=("prompt_lookup", "draft"),
        resume_tokens=(11, 12),
        stop=("a", "b"),
        stop_token_ids=frozenset({8, 9}),
        num_logprobs=0,
        include_stop=True,
        wants_trace=True,
        deadline=NOW + 2.5,
    )  # fmt: skip


def test_text_gets_the_special_tokens_of_the_tokenizer_and_chat_those_of_its_template():
    assert translate(pb.GenerateRequest(text="ab")).prompt == TOKENIZER.encode("ab")
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="ab")])
    assert translate(pb.GenerateRequest(chat=chat)).prompt == TOKENIZER.encode("ab", add_special_tokens=False)


def test_a_template_gets_tools_calls_and_what_else_is_given():
    template = "{{ tools | tojson }} {{ messages | tojson }} {{ mood }}"
    schema = {"type": "object"}
    chat = pb.ChatMessages(
        messages=[
            pb.ChatMessage(role="user", content="hi"),
            pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments='{"a": 1}')]),
            pb.ChatMessage(role="tool", content="2", tool_call_id="1", name="f"),
        ],
        tools=[pb.Tool(name="f", description="adds", parameters=json.dumps(schema)), pb.Tool(name="g")],
        template_arguments='{"mood": "glad"}',
    )
    info = replace(INFO, max_context_tokens=2000)
    (request,) = to_requests(pb.GenerateRequest(chat=chat), served(as_product(byte_level(), template), info=info), NOW)
    shown = [
        {"type": "function", "function": {"name": "f", "description": "adds", "parameters": schema}},
        {"type": "function", "function": {"name": "g", "description": "", "parameters": {}}},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
    ]
    expected = as_product(byte_level(), template).chat_text(messages, shown, {"mood": "glad"})
    assert TOKENIZER.decode(request.prompt) == expected
    assert expected.endswith(" glad")


def test_given_fields_go_before_the_models_own_and_zero_is_given():
    defaults = Sampling(temperature=0.6, top_k=20)
    assert translate(message(), defaults=defaults).sampling.top_k == 20
    request = translate(sampling(temperature=0.0, top_k=0), defaults=defaults)
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 0)


def test_each_request_without_a_seed_gets_another():
    assert len({translate(message()).sampling.seed for _ in range(5)}) == 5


def test_an_end_of_sequence_token_that_ends_nothing_is_not_kept_away():
    request = translate(stopping(ignore_eos=True, min_tokens=2, stop_token_ids=[9]))
    assert request.sampling.suppressed_ids == (9,)


def test_unset_max_tokens_is_the_default_or_what_there_is_room_for():
    short = translate(message(), config=ServiceConfig(CONFIG.target, limits=Limits(default_max_tokens=10)))
    assert short.max_tokens == 10
    assert short.expected_tokens == 10
    small_cache = ModelInfo("target", "Llama", "float32", "cpu", 0, VOCAB, CONTEXT, 50, (EOS,))
    assert translate(message(), info=small_cache).max_tokens == 47


def test_a_chat_without_max_tokens_may_fill_the_context_and_is_expected_to_be_of_usual_length():
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="abc")])
    wide = replace(INFO, max_context_tokens=5000)
    request = translate(pb.GenerateRequest(chat=chat), info=wide)
    assert (request.max_tokens, request.expected_tokens) == (4997, 256)
    bounded = ServiceConfig(CONFIG.target, limits=Limits(default_max_tokens=300))
    assert translate(pb.GenerateRequest(chat=chat), info=wide, config=bounded).max_tokens == 300
    assert translate(message(), info=wide).max_tokens == 256, "any other text"
    given = pb.GenerateRequest(chat=chat, stopping=pb.StoppingParams(max_tokens=9))
    assert (translate(given, info=wide).max_tokens, translate(given, info=wide).expected_tokens) == (9, None)


def test_the_context_may_be_filled_to_the_last_token():
    assert translate(stopping(max_tokens=CONTEXT - 3)).max_tokens == CONTEXT - 3


def test_the_ends_of_other_ranges_are_taken():
    for timeout_s in (5e-324, 86_400.0):
        assert translate(message(timeout_s=timeout_s)).deadline == NOW + timeout_s
    for num_logprobs in (0, 4):
        assert translate(message(logprobs=num_logprobs)).num_logprobs == num_logprobs
    for most in (0, 64):
        assert translate(message(speculation=pb.SpeculationParams(max_draft_tokens=most))).max_draft_tokens == most
    for least in (0, 5):
        assert translate(stopping(max_tokens=5, min_tokens=least)).sampling.min_tokens == least
    for seed in (0, 2**64 - 1):
        assert translate(sampling(seed=seed)).sampling.seed == seed
    for token_id in (0, VOCAB - 1):
        assert translate(sampling(logit_bias={token_id: 5e-324})).sampling.logit_bias == ((token_id, 5e-324),)


def test_the_service_chooses_the_verification_that_a_request_leaves_open():
    config = ServiceConfig(CONFIG.target, speculation=SpeculationConfig(verification=Verification.REJECTION))
    assert translate(message(), config=config).verification is Verification.REJECTION


def test_greedy_output_is_resumed_without_a_seed():
    request = message(resume_token_ids=[5], sampling=pb.SamplingParams(temperature=0.0))
    assert translate(request).resume_tokens == (5,)


def test_an_output_that_was_received_whole_but_for_its_end_is_resumed():
    """The client has every token, and wants to know why there are no more."""
    request = message(resume_token_ids=[5, 6], sampling=pb.SamplingParams(temperature=0.0))
    request.stopping.max_tokens = 2
    assert translate(request).resume_tokens == (5, 6)


RELAXED = ServiceConfig(CONFIG.target, speculation=SpeculationConfig(allow_relaxed=True))


def relaxed(name: str, resumed: int = 0, **fields: Any) -> pb.GenerateRequest:
    speculation = pb.SpeculationParams(verification=f"VERIFICATION_{name.upper()}", **fields)
    return message(
        speculation=speculation, resume_token_ids=[5] * resumed, sampling=pb.SamplingParams(temperature=1.0, seed=1)
    )


def test_relaxed_rules_are_served_where_they_are_allowed_and_named():
    request = translate(relaxed("lenient_coupled", lenience=0.5), config=RELAXED)
    assert (request.verification, request.lenience) == (Verification.LENIENT_COUPLED, 0.5)
    assert not request.is_repeatable
    assert translate(relaxed("typical"), config=RELAXED).lenience == 1.0
    assert translate(message(), config=RELAXED).rule.is_lossless


def test_a_template_is_compiled_and_needs_a_model_that_ends():
    given = message(speculation=pb.SpeculationParams(template="Dear .*,"))
    assert translate(given).template == Grammar(GrammarKind.REGEX, "Dear .*,")
    assert translate(message()).template is None
    with pytest.raises(InvalidRequest, match="no end-of-sequence token") as caught:
        translate(given, info=replace(INFO, eos_token_ids=()))
    assert caught.value.field == "speculation.template"


@pytest.mark.parametrize("wrong", [0.0, -1.0, 0.0001, 101.0, math.nan, math.inf])
def test_a_draft_temperature_has_a_range(wrong):
    assert translate(message(speculation=pb.SpeculationParams(draft_temperature=0.5))).draft_temperature == 0.5
    assert translate(message()).draft_temperature is None
    with pytest.raises(InvalidRequest, match=re.escape("must be in [0.001, 100]")) as caught:
        translate(message(speculation=pb.SpeculationParams(draft_temperature=wrong)))
    assert caught.value.field == "speculation.draft_temperature"


def test_samples_of_a_relaxed_rule_are_not_resumed_either():
    wrong = relaxed("typical")
    wrong.n = 2
    wrong.resume_samples.extend([pb.TokenIds(), pb.TokenIds(ids=[3])])
    with pytest.raises(InvalidRequest) as caught:
        to_requests(wrong, served(config=RELAXED), NOW)
    assert caught.value.field == "resume_samples"


def test_what_is_not_drafted_is_resumed_whatever_the_rule():
    request = translate(relaxed("lenient_coupled", resumed=1, lenience=0.5, max_draft_tokens=0), config=RELAXED)
    assert request.resume_tokens == (5,)


@pytest.mark.parametrize(
    ("wrong", "config", "field", "problem"),
    [
        (relaxed("lenient_coupled", lenience=0.5), CONFIG, "speculation.verification", "speculation.allow_relaxed"),
        (relaxed("typical"), CONFIG, "speculation.verification", "speculation.allow_relaxed"),
        (relaxed("lenient_rejection"), RELAXED, "speculation.lenience", "must be given with lenient_rejection"),
        (relaxed("coupled", lenience=0.5), RELAXED, "speculation.lenience", "for lenient_coupled, lenient_rejection"),
        (relaxed("typical", lenience=0.5), RELAXED, "speculation.lenience", "must not be given with typical"),
        *[
            (relaxed("lenient_coupled", lenience=wrong), RELAXED, "speculation.lenience", "in (0, 1]")
            for wrong in (0.0, -0.5, 1.01, math.nan, math.inf)
        ],
        (relaxed("lenient_coupled", 1, lenience=0.5), RELAXED, "resume_token_ids", "with lenient_coupled"),
        (relaxed("typical", 1), RELAXED, "resume_token_ids", "with typical"),
    ],
)
def test_relaxed_rules_are_refused_by_name_where_they_promise_nothing(wrong, config, field, problem):
    with pytest.raises(InvalidRequest) as caught:
        translate(wrong, config=config)
    assert caught.value.field == field
    assert problem in caught.value.problem


# What is refused, and how it is named

CHAT = pb.ChatMessages


def CALLED(**fields: Any) -> pb.GenerateRequest:  # noqa: N802 - as the messages beside it
    """A chat of one message."""
    return pb.GenerateRequest(chat=CHAT(messages=[pb.ChatMessage(**{"role": "assistant", **fields})]))


def TOOLS(*tools: pb.Tool, **fields: Any) -> pb.GenerateRequest:  # noqa: N802
    """A chat with tools."""
    return pb.GenerateRequest(chat=CHAT(messages=[pb.ChatMessage(role="user", content="x")], tools=tools, **fields))


NUMBERS = {name: ranges_of(Sampling)[name] for name in GIVEN_SAMPLING if name != "seed"}
"""Sampling parameters that can be out of range."""
REFUSED = [
    (pb.GenerateRequest(), "prompt", "one of text, token_ids and chat"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids", "at least one token"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * CONTEXT)), "token_ids", "at most 99 tokens"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, VOCAB])), "token_ids.ids[1]", f"[0, {VOCAB - 1}]"),
    (pb.GenerateRequest(text="x " * CONTEXT), "text", "at most 99 tokens"),
    (pb.GenerateRequest(chat=CHAT()), "chat.messages", "at least one message"),
    (pb.GenerateRequest(chat=CHAT(messages=[pb.ChatMessage(content="x")])), "chat.messages[0].role", "not be empty"),
    (pb.GenerateRequest(chat=CHAT(messages=[pb.ChatMessage(role="x")])), "chat.messages", "at least one token"),
    (
        CALLED(tool_calls=[pb.ToolCall(name="f", arguments="[]")]),
        "chat.messages[0].tool_calls[0].arguments",
        "JSON object",
    ),
    (CALLED(role="user", tool_calls=[pb.ToolCall()]), "chat.messages[0].tool_calls", "role is assistant"),
    (CALLED(tool_call_id="1"), "chat.messages[0].tool_call_id", "role is tool"),
    (TOOLS(pb.Tool(name="f")), "chat.tools", "takes no tools"),
    (TOOLS(pb.Tool(name="f g")), "chat.tools[0].name", "1 to 128 letters"),
    (TOOLS(pb.Tool(name="f"), pb.Tool(name="f")), "chat.tools[1].name", "another name"),
    (TOOLS(pb.Tool(name="f", parameters="{")), "chat.tools[0].parameters", "JSON object"),
    (TOOLS(*[pb.Tool(name="f")] * 129), "chat.tools", "at most 128"),
    (TOOLS(template_arguments="5"), "chat.template_arguments", "JSON object"),
    (message(request_id="x" * 129), "request_id", "at most 128"),
    (message(request_id="a\nb"), "request_id", "printable"),
    (message(logprobs=5), "logprobs", "[0, 4]"),
    (message(resume_token_ids=[VOCAB]), "resume_token_ids[0]", f"[0, {VOCAB - 1}]"),
    (message(resume_token_ids=[5] * CONTEXT), "resume_token_ids", "at most 97"),
    (message(resume_token_ids=[5]), "sampling.seed", "to resume"),
    (stopping(max_tokens=0), "stopping.max_tokens", "[1, 97]"),
    (stopping(max_tokens=98), "stopping.max_tokens", "[1, 97]"),
    (stopping(max_tokens=5, min_tokens=6), "stopping.min_tokens", "[0, 5]"),
    (stopping(stop=["a", "b", "c"]), "stopping.stop", "at most 2"),
    (stopping(stop=["a", ""]), "stopping.stop[1]", "1 to 5"),
    (stopping(stop=["abcdef"]), "stopping.stop[0]", "1 to 5"),
    (stopping(stop_token_ids=[5, 6, 7, 8]), "stopping.stop_token_ids", "at most 3"),
    (stopping(stop_token_ids=[VOCAB]), "stopping.stop_token_ids[0]", f"[0, {VOCAB - 1}]"),
    (sampling(logit_bias={5: 1, 6: 1, 7: 1}), "sampling.logit_bias", "at most 2"),
    (sampling(logit_bias={VOCAB: 1}), "sampling.logit_bias", f"[0, {VOCAB - 1}]"),
    (sampling(logit_bias={5: 100.5}), "sampling.logit_bias[5]", "[-100, 100]"),
    (sampling(logit_bias={5: math.nan}), "sampling.logit_bias[5]", "[-100, 100]"),
    (message(speculation=pb.SpeculationParams(verification=77)), "speculation.verification", "VERIFICATION_COUPLED"),
    (
        message(speculation=pb.SpeculationParams(policy="Static")),
        "speculation.policy",
        "adaptive, static, static_tree, heuristic",
    ),
    (guessers("draft", "oracle"), "speculation.guessers[1]", "one of draft, prompt_lookup"),
    (guessers("draft", ""), "speculation.guessers[1]", "one of draft, prompt_lookup"),
    (guessers("draft", "head"), "speculation.guessers[1]", "one of draft, prompt_lookup"),
    (guessers("draft", "draft"), "speculation.guessers[1]", "another name"),
    (guessers(*["draft"] * 100), "speculation.guessers", "at most"),
    (message(speculation=pb.SpeculationParams(template="(a")), "speculation.template", "unclosed group"),
    (message(speculation=pb.SpeculationParams(template="")), "speculation.template", "must not be empty"),
    (message(speculation=pb.SpeculationParams(max_draft_tokens=65)), "speculation.max_draft_tokens", "[0, 64]"),
    *[
        (message(timeout_s=timeout_s), "timeout_s", "(0, 86400]")
        for timeout_s in (0.0, -1.0, math.nan, math.inf, 86_401.0)
    ],
    *[
        (sampling(**{name: value}), f"sampling.{name}", f"must be {allowed}, got ")
        for name, allowed in NUMBERS.items()
        for value in (allowed.high + 1, *([] if allowed.is_whole else (allowed.low - 1, math.nan, math.inf, -math.inf)))
    ],
    *[
        (sampling(**{name: value}), f"sampling.{name}", f"must be {NUMBERS[name]}, got ")
        for name, values in (
            ("temperature", (1e-9, 5e-324)),
            ("top_k", (2**32 - 1,)),
            ("top_p", (0.0,)),
            ("repetition_penalty", (0.0, 1e-38, 5e-324)),
        )
        for value in values
    ],
]


@pytest.mark.parametrize(
    ("wrong", "field", "allowed"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_field_is_refused_by_its_path_and_what_is_allowed(wrong, field, allowed):
    with pytest.raises(InvalidRequest) as caught:
        translate(wrong)
    assert caught.value.field == field
    assert allowed in caught.value.problem


WRONG_MASKS = [
    ({"allowed_token_ids": [5, VOCAB]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [2**32 - 1]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "bad_word_ids": [pb.TokenIds(ids=[5])]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 65, "bad_word_ids": [pb.TokenIds(ids=[5])] * 64}, "bad_words"),
    ({"bad_words": ["a", "ab" * 40]}, "bad_words[1]"),
    ({"bad_word_ids": [pb.TokenIds()]}, "bad_word_ids[0].ids"),
    ({"bad_word_ids": [pb.TokenIds(ids=[5] * 65)]}, "bad_word_ids[0].ids"),
    ({"bad_word_ids": [pb.TokenIds(ids=[5, VOCAB])]}, "bad_word_ids[0].ids[1]"),
    ({"bad_word_ids": [pb.TokenIds(ids=[5])] * 129}, "bad_word_ids"),
]


@pytest.mark.parametrize(("fields", "field"), WRONG_MASKS)
def test_a_wrong_mask_is_refused_by_its_path(fields, field):
    with pytest.raises(InvalidRequest) as caught:
        translate(sampling(**fields))
    assert caught.value.field == f"sampling.{field}"


def test_a_bad_word_is_masked_as_a_text_begins_with_it_and_as_it_follows_a_space():
    class Words:
        """One token for each word, with the space before it."""

        def __init__(self) -> None:
            self.ids = {"bad": (4,), " bad": (5,), "word": (6, 7), " word": (8, 9, 7), "\n": (3,), " \n": (3,)}

        def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
            assert not add_special_tokens
            return self.ids[text]

        def max_text_bytes(self, _num_tokens: int) -> None:
            return None

    def of(*texts: str) -> tuple[tuple[int, ...], ...]:
        return bad_words(texts, (), Words(), INFO, CONFIG.limits)

    assert of("bad") == of("  bad") == ((4,), (5,))
    assert of("word") == ((6, 7),), "as many tokens, or another word may be meant: vLLM's rule"
    assert of("\n") == ((3,),), "a space alone is a word, too"


NEGATIVE = 2**32 - 1
"""protobuf's value of a -1 in a uint32."""


MINUS_ONES = [
    (sampling(top_k=NEGATIVE), "sampling.top_k"),
    (sampling(logit_bias={NEGATIVE: 1.0}), "sampling.logit_bias"),
    (stopping(max_tokens=NEGATIVE), "stopping.max_tokens"),
    (stopping(min_tokens=NEGATIVE), "stopping.min_tokens"),
    (stopping(stop_token_ids=[NEGATIVE]), "stopping.stop_token_ids[0]"),
    (message(logprobs=NEGATIVE), "logprobs"),
    (message(resume_token_ids=[NEGATIVE]), "resume_token_ids[0]"),
    (message(speculation=pb.SpeculationParams(max_draft_tokens=NEGATIVE)), "speculation.max_draft_tokens"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[NEGATIVE])), "token_ids.ids[0]"),
]


@pytest.mark.parametrize(("wrong", "field"), MINUS_ONES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_minus_one_is_told_as_it_was_written(wrong, field):
    with pytest.raises(InvalidRequest) as caught:
        translate(wrong)
    assert caught.value.field == field
    assert "got 4294967295 (-1 as an unsigned 32-bit number)" in caught.value.problem


def test_a_text_that_gives_no_tokens_is_refused():
    class Bare:
        def max_text_bytes(self, _num_tokens: int) -> None:
            return None

        def encode(self, _text: str) -> tuple[int, ...]:
            return ()

    with pytest.raises(InvalidRequest, match="text: must hold at least one token"):
        to_requests(pb.GenerateRequest(text=""), served(Bare()), NOW)


# The model's own defaults


def test_defaults_are_those_of_the_models_generation_config(tmp_path):
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": None, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert sampling_defaults(tmp_path) == Sampling(temperature=0.6, top_p=0.95)


def test_tokens_that_the_model_forbids_are_forbidden_to_every_request(tmp_path):
    given = {"bad_words_ids": [[7], [8, 9]], "suppress_tokens": [3]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    defaults = sampling_defaults(tmp_path)
    assert defaults.bad_words == ((7,), (8, 9), (3,))
    message = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(bad_word_ids=[pb.TokenIds(ids=[5])]))
    (request,) = to_requests(message, replace(served(), defaults=defaults), NOW)
    assert request.sampling.bad_words == ((7,), (8, 9), (3,), (5,))


def test_a_model_without_a_generation_config_is_sampled_as_it_is(tmp_path):
    assert sampling_defaults(tmp_path) == Sampling()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"top_p": 7}',
        '{"temperature": "warm"}',
        '{"top_k": 50.5}',
        '{"bad_words_ids": [["a"]]}',
        '{"suppress_tokens": 3}',
    ],
)
def test_a_generation_config_that_no_request_could_ask_for_is_refused_at_start(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)


class Untouched:
    """Fails the test if it is asked to tokenize anything."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def max_text_bytes(self, num_tokens):
        return self._tokenizer.max_text_bytes(num_tokens)

    def chat_text(self, messages, _tools, _arguments, *, continues):
        return "".join(message["content"] for message in messages)

    def encode(self, _text, add_special_tokens=True):
        pytest.fail("this text need not have been tokenized")


LONGEST = TOKENIZER.max_text_bytes(INFO.max_context_tokens)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (pb.GenerateRequest(text="x" * (LONGEST + 1)), "text"),
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[{"role": "u", "content": "x" * (LONGEST + 1)}])), "chat"),
    ],
)
def test_what_is_too_long_in_any_case_is_refused_before_it_is_tokenized(wrong, field):
    with pytest.raises(InvalidRequest) as caught:
        to_requests(wrong, served(Untouched(TOKENIZER)), NOW)
    assert caught.value.field.startswith(field)
    assert f"{LONGEST + 1} bytes" in caught.value.problem


# Structured output


@pytest.mark.parametrize(
    ("structured", "grammar"),
    [
        ({"json_schema": '{"type":"null"}'}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}')),
        ({"json_object": True}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"choice": pb.Choices(choices=["a", "b"])}, Grammar(GrammarKind.REGEX, "a|b")),
        ({"grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_what_the_output_must_look_like_arrives(structured, grammar):
    assert translate(message(structured_output=pb.StructuredOutput(**structured))).grammar == grammar


WRONG_STRUCTURES = [
    ({}, "structured_output"),
    ({"json_schema": "{"}, "structured_output.json_schema"),
    ({"json_object": False}, "structured_output.json_object"),
    ({"regex": "(a"}, "structured_output.regex"),
    ({"choice": pb.Choices()}, "structured_output.choice"),
    ({"grammar": "start: b"}, "structured_output.grammar"),
]


@pytest.mark.parametrize(("structured", "field"), WRONG_STRUCTURES)
def test_what_it_cannot_be_held_to_is_refused(structured, field):
    with pytest.raises(InvalidRequest) as refused:
        translate(message(structured_output=pb.StructuredOutput(**structured)))
    assert refused.value.field == field


def test_nothing_but_an_end_of_sequence_token_ends_it():
    structured = pb.StructuredOutput(regex="a+")
    with pytest.raises(InvalidRequest, match=r"stopping\.ignore_eos: must be false"):
        translate(message(structured_output=structured, stopping=pb.StoppingParams(ignore_eos=True)))
    masked = pb.SamplingParams(allowed_token_ids=[5])
    with pytest.raises(InvalidRequest, match=r"sampling\.allowed_token_ids: must not be given"):
        translate(message(structured_output=structured, sampling=masked))
    endless = ModelInfo("target", "Llama", "float32", "cpu", 0, VOCAB, CONTEXT, 10_000, ())
    with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
        translate(message(structured_output=structured), info=endless)
