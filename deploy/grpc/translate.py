"""From the wire to the core: a request is checked field by field, and becomes a record.

Pure functions. Knows the generated messages, the records and the tokenizer; must not know gRPC, Serve or sessions
(`deploy.grpc.responses` goes the other way). Every refusal names the field by its path in the proto, and comes before
any model work.
"""

from __future__ import annotations

import json
import math
import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from core.config import Limits, ServiceConfig
from core.errors import CheckpointError, InvalidRequest
from core.ranges import shown
from core.records import GenerationRequest, ModelInfo, Policy, Sampling, Verification
from orchestrator.text import Tokenizer
from protos.outrider.v1 import generation_pb2 as pb

MAX_REQUEST_ID_CHARS = 128
MAX_TIMEOUT_S = 86_400.0
MAX_DRAFT_TOKENS = 64
"""What SpeculationConfig allows, too. A request may ask for more than this service drafts: it is an upper bound."""
SEED_BITS = 64

VERIFICATIONS = {
    pb.VERIFICATION_COUPLED: Verification.COUPLED,
    pb.VERIFICATION_REJECTION: Verification.REJECTION,
    pb.VERIFICATION_BLOCK: Verification.BLOCK,
}
POLICIES: dict[str, Policy] = {policy: policy for policy in get_args(Policy)}
MODEL_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling fields for which a model may bring its own defaults."""
_SAMPLING = (*MODEL_SAMPLING, "presence_penalty", "frequency_penalty", "seed")


def sampling_defaults(model_dir: str | Path) -> Sampling:
    """What unset sampling fields take: the model's generation_config.json, else temperature 1 and everything else off.

    Its `do_sample` is not read: a temperature of 0 is how this service spells greedy.
    Raises: CheckpointError when the file is not JSON or gives a value that no request could.
    """
    file = Path(model_dir) / "generation_config.json"
    if not file.is_file():
        return Sampling()
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        return Sampling(**{name: settings[name] for name in MODEL_SAMPLING if settings.get(name) is not None})
    except (ValueError, TypeError, AttributeError, InvalidRequest) as error:
        raise CheckpointError(f"{file} does not give sampling defaults: {error}") from error


def to_generation_request(
    message: pb.GenerateRequest,
    *,
    tokenizer: Tokenizer,
    info: ModelInfo,
    defaults: Sampling,
    config: ServiceConfig,
    now: float,
) -> GenerationRequest:
    """The request as a record, complete and within all limits. `now` is the service's clock, for the deadline.

    Raises: InvalidRequest.
    """
    limits, stopping = config.limits, message.stopping
    prompt = _prompt(message, tokenizer, info)
    max_tokens = _max_tokens(message, len(prompt), info, limits)
    stop_token_ids = _stop_token_ids(stopping, info, limits)
    sampling = replace(
        _sampling(message.sampling, defaults, info, limits),
        min_tokens=_min_tokens(stopping, max_tokens),
        suppressed_ids=_ending_ids(stopping, stop_token_ids, info),
    )
    return GenerationRequest(
        request_id=_request_id(message.request_id),
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        verification=_verification(message.speculation, config),
        max_draft_tokens=_max_draft_tokens(message.speculation),
        policy=_policy(message.speculation.policy),
        pipelining=message.speculation.pipelining if message.speculation.HasField("pipelining") else None,
        resume_tokens=_resume_tokens(message, sampling, max_tokens, info),
        stop=_stop_strings(stopping.stop, limits),
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        num_logprobs=_num_logprobs(message, limits),
        include_stop=stopping.include_stop,
        wants_trace=message.speculation.trace,
        deadline=_deadline(message, now),
    )


def token_ids(ids: Iterable[int], field: str, info: ModelInfo) -> tuple[int, ...]:
    """The ids, each of them in the vocabulary. Raises: InvalidRequest that names the first that is not."""
    checked = tuple(ids)
    if max(checked, default=0) >= info.vocab_size:
        index, wrong = next((i, token) for i, token in enumerate(checked) if token >= info.vocab_size)
        raise InvalidRequest(f"{field}[{index}]", f"must be in [0, {info.vocab_size - 1}], got {shown(wrong)}")
    return checked


def _require(condition: bool, field: str, allowed: str, value: object) -> None:
    if not condition:
        raise InvalidRequest(field, f"must be {allowed}, got {shown(value)}")


def _request_id(given: str) -> str:
    is_fit = len(given) <= MAX_REQUEST_ID_CHARS and given.isprintable()
    _require(is_fit, "request_id", f"at most {MAX_REQUEST_ID_CHARS} printable characters", f"{len(given)} characters")
    return given or uuid.uuid4().hex


def _prompt(message: pb.GenerateRequest, tokenizer: Tokenizer, info: ModelInfo) -> tuple[int, ...]:
    """What is too long for the context in any case is refused before it costs the time of tokenizing it."""
    context = _context(info)
    match message.WhichOneof("prompt"):
        case "text":
            field = "text"
            check_length(message.text, field, tokenizer, context)
            prompt = tokenizer.encode(message.text)
        case "token_ids":
            field, ids = "token_ids.ids", message.token_ids.ids
            _require(len(ids) < context, "token_ids", f"at most {context - 1} tokens long", len(ids))
            prompt = token_ids(ids, field, info)
        case "chat":
            field, text = "chat.messages", _chat_text(message.chat, tokenizer)
            check_length(text, field, tokenizer, context)
            prompt = tokenizer.encode(text, add_special_tokens=False)
        case _:
            raise InvalidRequest("prompt", "one of text, token_ids and chat must be given")
    if not prompt:
        raise InvalidRequest(field, "must hold at least one token")
    return prompt


def check_length(text: str, field: str, tokenizer: Tokenizer, context: int) -> None:
    """Raises: InvalidRequest when no tokenization of `text` fits into a context of so many tokens."""
    most, size = tokenizer.max_text_bytes(context), len(text.encode())
    if most is not None and size > most:
        raise InvalidRequest(field, f"must be at most {context - 1} tokens long, which {size} bytes are not")


def _context(info: ModelInfo) -> int:
    """Tokens that prompt and output may have together."""
    return min(info.max_context_tokens, info.kv_cache_tokens)


def _chat_text(chat: pb.ChatMessages, tokenizer: Tokenizer) -> str:
    if not chat.messages:
        raise InvalidRequest("chat.messages", "must hold at least one message")
    for index, entry in enumerate(chat.messages):
        if not entry.role:
            raise InvalidRequest(f"chat.messages[{index}].role", "must not be empty")
    return tokenizer.chat_text([{"role": entry.role, "content": entry.content} for entry in chat.messages])


def _max_tokens(message: pb.GenerateRequest, prompt_len: int, info: ModelInfo, limits: Limits) -> int:
    """Tokens of output in all, resumed ones included."""
    context = _context(info)
    room = context - prompt_len
    if room < 1:
        field = str(message.WhichOneof("prompt"))
        raise InvalidRequest(field, f"must be at most {context - 1} tokens long, got {prompt_len}")
    if not message.stopping.HasField("max_tokens"):
        return min(limits.default_max_tokens, room)
    asked = message.stopping.max_tokens
    allowed = f"in [1, {room}] (a context of {context} less the prompt's {prompt_len})"
    _require(1 <= asked <= room, "stopping.max_tokens", allowed, asked)
    return asked


def _min_tokens(stopping: pb.StoppingParams, max_tokens: int) -> int:
    allowed = f"in [0, {max_tokens}] (the most tokens of output)"
    _require(stopping.min_tokens <= max_tokens, "stopping.min_tokens", allowed, stopping.min_tokens)
    return stopping.min_tokens


def _resume_tokens(
    message: pb.GenerateRequest, sampling: Sampling, max_tokens: int, info: ModelInfo
) -> tuple[int, ...]:
    resumed = token_ids(message.resume_token_ids, "resume_token_ids", info)
    allowed = f"at most {max_tokens} ids (the most tokens of output)"
    _require(len(resumed) <= max_tokens, "resume_token_ids", allowed, len(resumed))
    if resumed and not sampling.is_greedy and not message.sampling.HasField("seed"):
        raise InvalidRequest("sampling.seed", "must be given to resume an output: the last chunk or the caller has it")
    return resumed


def _stop_token_ids(stopping: pb.StoppingParams, info: ModelInfo, limits: Limits) -> tuple[int, ...]:
    field, given, most = "stopping.stop_token_ids", stopping.stop_token_ids, limits.max_stop_token_ids
    _require(len(given) <= most, field, f"at most {most} ids", len(given))
    return token_ids(given, field, info)


def _ending_ids(stopping: pb.StoppingParams, stop_token_ids: Sequence[int], info: ModelInfo) -> tuple[int, ...]:
    """The ids that end this output, and so may not appear before `min_tokens`.

    With `ignore_eos` an end-of-sequence token is an ordinary one: it ends nothing, and nothing keeps it away.
    """
    eos = () if stopping.ignore_eos else info.eos_token_ids
    return tuple(sorted({*eos, *stop_token_ids}))


def _stop_strings(given: Sequence[str], limits: Limits) -> tuple[str, ...]:
    most, longest = limits.max_stop_strings, limits.max_stop_chars
    _require(len(given) <= most, "stopping.stop", f"at most {most} strings", len(given))
    for index, stop in enumerate(given):
        allowed = f"1 to {longest} characters long"
        _require(1 <= len(stop) <= longest, f"stopping.stop[{index}]", allowed, len(stop))
    return tuple(given)


def _sampling(message: pb.SamplingParams, defaults: Sampling, info: ModelInfo, limits: Limits) -> Sampling:
    """The given fields over the defaults; a seed is drawn when there is none, so that the caller can be told it."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _SAMPLING if message.HasField(name)}
    given.setdefault("seed", secrets.randbits(SEED_BITS))
    try:
        return replace(defaults, **given, logit_bias=_logit_bias(message, info, limits))
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling.{error.field}", error.problem) from None


def _logit_bias(message: pb.SamplingParams, info: ModelInfo, limits: Limits) -> tuple[tuple[int, float], ...]:
    given, most = message.logit_bias, limits.max_logit_bias
    _require(len(given) <= most, "logit_bias", f"at most {most} entries", len(given))
    wrong = next((token_id for token_id in given if token_id >= info.vocab_size), None)
    _require(wrong is None, "logit_bias", f"of token ids in [0, {info.vocab_size - 1}]", wrong)
    return tuple(sorted(given.items()))


def _verification(speculation: pb.SpeculationParams, config: ServiceConfig) -> Verification:
    number = speculation.verification
    if number == pb.VERIFICATION_UNSPECIFIED:
        return config.speculation.verification
    allowed = f"one of {', '.join(map(pb.Verification.Name, VERIFICATIONS))}"
    _require(number in VERIFICATIONS, "speculation.verification", allowed, number)
    return VERIFICATIONS[number]


def _max_draft_tokens(speculation: pb.SpeculationParams) -> int | None:
    if not speculation.HasField("max_draft_tokens"):
        return None
    asked = speculation.max_draft_tokens
    _require(asked <= MAX_DRAFT_TOKENS, "speculation.max_draft_tokens", f"in [0, {MAX_DRAFT_TOKENS}]", asked)
    return asked


def _policy(given: str) -> Policy | None:
    _require(given in ("", *POLICIES), "speculation.policy", f"one of {', '.join(POLICIES)}", given)
    return POLICIES.get(given)


def _num_logprobs(message: pb.GenerateRequest, limits: Limits) -> int | None:
    if not message.HasField("logprobs"):
        return None
    _require(message.logprobs <= limits.max_logprobs, "logprobs", f"in [0, {limits.max_logprobs}]", message.logprobs)
    return message.logprobs


def _deadline(message: pb.GenerateRequest, now: float) -> float | None:
    if not message.HasField("timeout_s"):
        return None
    is_allowed = math.isfinite(message.timeout_s) and 0 < message.timeout_s <= MAX_TIMEOUT_S
    _require(is_allowed, "timeout_s", f"in (0, {MAX_TIMEOUT_S:g}]", message.timeout_s)
    return now + message.timeout_s
