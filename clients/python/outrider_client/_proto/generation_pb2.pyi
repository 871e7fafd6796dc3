from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_WHEN_FULL: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class ServiceTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_TIER_UNSPECIFIED: _ClassVar[ServiceTier]
    SERVICE_TIER_DEFAULT: _ClassVar[ServiceTier]
    SERVICE_TIER_FLEX: _ClassVar[ServiceTier]
    SERVICE_TIER_PRIORITY: _ClassVar[ServiceTier]

class Verification(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_UNSPECIFIED: _ClassVar[Verification]
    VERIFICATION_COUPLED: _ClassVar[Verification]
    VERIFICATION_REJECTION: _ClassVar[Verification]
    VERIFICATION_BLOCK: _ClassVar[Verification]
    VERIFICATION_LENIENT_COUPLED: _ClassVar[Verification]
    VERIFICATION_LENIENT_REJECTION: _ClassVar[Verification]
    VERIFICATION_TYPICAL: _ClassVar[Verification]
    VERIFICATION_RECURSIVE_REJECTION: _ClassVar[Verification]
    VERIFICATION_SEQUENTIAL_SELECTION: _ClassVar[Verification]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class Call(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CALL_UNSPECIFIED: _ClassVar[Call]
    CALL_VERIFY: _ClassVar[Call]
    CALL_BLOCK: _ClassVar[Call]
    CALL_GROWTH: _ClassVar[Call]
    CALL_PREFILL: _ClassVar[Call]
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_WHEN_FULL: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
SERVICE_TIER_UNSPECIFIED: ServiceTier
SERVICE_TIER_DEFAULT: ServiceTier
SERVICE_TIER_FLEX: ServiceTier
SERVICE_TIER_PRIORITY: ServiceTier
VERIFICATION_UNSPECIFIED: Verification
VERIFICATION_COUPLED: Verification
VERIFICATION_REJECTION: Verification
VERIFICATION_BLOCK: Verification
VERIFICATION_LENIENT_COUPLED: Verification
VERIFICATION_LENIENT_REJECTION: Verification
VERIFICATION_TYPICAL: Verification
VERIFICATION_RECURSIVE_REJECTION: Verification
VERIFICATION_SEQUENTIAL_SELECTION: Verification
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
CALL_UNSPECIFIED: Call
CALL_VERIFY: Call
CALL_BLOCK: Call
CALL_GROWTH: Call
CALL_PREFILL: Call

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "source", "source_token_ids", "request_id", "sampling", "stopping", "speculation", "logprobs", "resume_token_ids", "timeout_s", "n", "resume_samples", "prompt_logprobs", "priority", "service_tier", "structured_output", "beams", "receipt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    RESUME_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIER_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatMessages
    source: str
    source_token_ids: TokenIds
    request_id: str
    sampling: SamplingParams
    stopping: StoppingParams
    speculation: SpeculationParams
    logprobs: int
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    n: int
    resume_samples: _containers.RepeatedCompositeFieldContainer[TokenIds]
    prompt_logprobs: int
    priority: int
    service_tier: ServiceTier
    structured_output: StructuredOutput
    beams: BeamParams
    receipt: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., source: _Optional[str] = ..., source_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., request_id: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingParams, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., logprobs: _Optional[int] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ..., n: _Optional[int] = ..., resume_samples: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., service_tier: _Optional[_Union[ServiceTier, str]] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., beams: _Optional[_Union[BeamParams, _Mapping]] = ..., receipt: _Optional[bool] = ...) -> None: ...

class BeamParams(_message.Message):
    __slots__ = ("beam_width", "length_penalty", "early_stopping")
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choices
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools", "template_arguments")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    template_arguments: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., template_arguments: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "allowed_token_ids", "bad_words", "bad_word_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_word_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ...) -> None: ...

class StoppingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop: _Optional[bool] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("max_draft_tokens", "verification", "trace", "policy", "pipelining", "guessers", "lenience", "explain", "draft_temperature", "template", "learning")
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PIPELINING_FIELD_NUMBER: _ClassVar[int]
    GUESSERS_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    max_draft_tokens: int
    verification: Verification
    trace: bool
    policy: str
    pipelining: bool
    guessers: _containers.RepeatedScalarFieldContainer[str]
    lenience: float
    explain: bool
    draft_temperature: float
    template: str
    learning: bool
    def __init__(self, max_draft_tokens: _Optional[int] = ..., verification: _Optional[_Union[Verification, str]] = ..., trace: _Optional[bool] = ..., policy: _Optional[str] = ..., pipelining: _Optional[bool] = ..., guessers: _Optional[_Iterable[str]] = ..., lenience: _Optional[float] = ..., explain: _Optional[bool] = ..., draft_temperature: _Optional[float] = ..., template: _Optional[str] = ..., learning: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[AlternativeLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[AlternativeLogprob, _Mapping]]] = ...) -> None: ...

class AlternativeLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SourceStats(_message.Message):
    __slots__ = ("name", "drafted_tokens", "accepted_tokens", "failures")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    drafted_tokens: int
    accepted_tokens: int
    failures: int
    def __init__(self, name: _Optional[str] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., failures: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("target_passes", "draft_passes", "drafted_tokens", "accepted_tokens", "accepted_per_position", "draft_failures", "target_failures", "hits", "misses", "draft_time_s", "hidden_draft_time_s", "lookup_tokens", "continued_passes", "relaxed_tokens", "sources")
    TARGET_PASSES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PASSES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FAILURES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_DRAFT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_PASSES_FIELD_NUMBER: _ClassVar[int]
    RELAXED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    target_passes: int
    draft_passes: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    draft_failures: int
    target_failures: int
    hits: int
    misses: int
    draft_time_s: float
    hidden_draft_time_s: float
    lookup_tokens: int
    continued_passes: int
    relaxed_tokens: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceStats]
    def __init__(self, target_passes: _Optional[int] = ..., draft_passes: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., draft_failures: _Optional[int] = ..., target_failures: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., draft_time_s: _Optional[float] = ..., hidden_draft_time_s: _Optional[float] = ..., lookup_tokens: _Optional[int] = ..., continued_passes: _Optional[int] = ..., relaxed_tokens: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceStats, _Mapping]]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("waited_s", "computed_s", "passes", "rows")
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    waited_s: float
    computed_s: float
    passes: int
    rows: int
    def __init__(self, waited_s: _Optional[float] = ..., computed_s: _Optional[float] = ..., passes: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class VerifiedBlock(_message.Message):
    __slots__ = ("token_ids", "parents", "sources", "path", "next_token_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[str]
    path: _containers.RepeatedScalarFieldContainer[int]
    next_token_id: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[str]] = ..., path: _Optional[_Iterable[int]] = ..., next_token_id: _Optional[int] = ...) -> None: ...

class CallTrace(_message.Message):
    __slots__ = ("call", "sent_s", "received_s", "guesses", "used", "timing", "verified")
    CALL_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    call: Call
    sent_s: float
    received_s: float
    guesses: int
    used: int
    timing: Timing
    verified: VerifiedBlock
    def __init__(self, call: _Optional[_Union[Call, str]] = ..., sent_s: _Optional[float] = ..., received_s: _Optional[float] = ..., guesses: _Optional[int] = ..., used: _Optional[int] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., verified: _Optional[_Union[VerifiedBlock, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop", "stop_token_id", "seed", "speculation", "receipt", "problem", "score")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop: str
    stop_token_id: int
    seed: int
    speculation: SpeculationStats
    receipt: Receipt
    problem: str
    score: float
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., seed: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., problem: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("version", "model", "target", "draft", "tokenizer_digest", "prompt_digest", "prompt_tokens", "output_digest", "output_tokens", "sampling", "stopping", "verification", "lenience", "structured_output_digest", "depends_on_guesses", "adapter_digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DEPENDS_ON_GUESSES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    target: ReceiptModel
    draft: ReceiptModel
    tokenizer_digest: str
    prompt_digest: str
    prompt_tokens: int
    output_digest: str
    output_tokens: int
    sampling: SamplingParams
    stopping: StoppingParams
    verification: Verification
    lenience: float
    structured_output_digest: str
    depends_on_guesses: bool
    adapter_digest: str
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., target: _Optional[_Union[ReceiptModel, _Mapping]] = ..., draft: _Optional[_Union[ReceiptModel, _Mapping]] = ..., tokenizer_digest: _Optional[str] = ..., prompt_digest: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_digest: _Optional[str] = ..., output_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingParams, _Mapping]] = ..., verification: _Optional[_Union[Verification, str]] = ..., lenience: _Optional[float] = ..., structured_output_digest: _Optional[str] = ..., depends_on_guesses: _Optional[bool] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class ReceiptModel(_message.Message):
    __slots__ = ("name", "digest", "architecture", "dtype", "device", "arithmetic", "deterministic", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    architecture: str
    dtype: str
    device: str
    arithmetic: str
    deterministic: bool
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., arithmetic: _Optional[str] = ..., deterministic: _Optional[bool] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "guessed", "logprobs", "usage", "finish", "trace", "explanation", "index", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GUESSED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    guessed: _containers.RepeatedScalarFieldContainer[bool]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    usage: Usage
    finish: Finish
    trace: _containers.RepeatedCompositeFieldContainer[CallTrace]
    explanation: _containers.RepeatedScalarFieldContainer[str]
    index: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., guessed: _Optional[_Iterable[bool]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., trace: _Optional[_Iterable[_Union[CallTrace, _Mapping]]] = ..., explanation: _Optional[_Iterable[str]] = ..., index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "logprobs", "usage", "finish", "trace", "explanation", "samples", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    usage: Usage
    finish: Finish
    trace: _containers.RepeatedCompositeFieldContainer[CallTrace]
    explanation: _containers.RepeatedScalarFieldContainer[str]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., trace: _Optional[_Iterable[_Union[CallTrace, _Mapping]]] = ..., explanation: _Optional[_Iterable[str]] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "finish", "trace", "explanation")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish: Finish
    trace: _containers.RepeatedCompositeFieldContainer[CallTrace]
    explanation: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., trace: _Optional[_Iterable[_Union[CallTrace, _Mapping]]] = ..., explanation: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ListedModel]
    def __init__(self, models: _Optional[_Iterable[_Union[ListedModel, _Mapping]]] = ...) -> None: ...

class ListedModel(_message.Message):
    __slots__ = ("name", "max_context_tokens", "vocab_size", "has_draft", "adapter_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_DRAFT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_context_tokens: int
    vocab_size: int
    has_draft: bool
    adapter_of: str
    def __init__(self, name: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., has_draft: _Optional[bool] = ..., adapter_of: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "dtype", "device", "num_parameters", "vocab_size", "max_context_tokens", "kv_cache_tokens", "eos_token_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    vocab_size: int
    max_context_tokens: int
    kv_cache_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., num_parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., kv_cache_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "target", "draft", "max_draft_tokens", "verification", "sampling_defaults", "control")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    model: str
    target: ModelInfo
    draft: ModelInfo
    max_draft_tokens: int
    verification: Verification
    sampling_defaults: SamplingParams
    control: ControlReport
    def __init__(self, model: _Optional[str] = ..., target: _Optional[_Union[ModelInfo, _Mapping]] = ..., draft: _Optional[_Union[ModelInfo, _Mapping]] = ..., max_draft_tokens: _Optional[int] = ..., verification: _Optional[_Union[Verification, str]] = ..., sampling_defaults: _Optional[_Union[SamplingParams, _Mapping]] = ..., control: _Optional[_Union[ControlReport, _Mapping]] = ...) -> None: ...

class ControlReport(_message.Message):
    __slots__ = ("policy", "sessions", "draft_tokens", "block_tokens", "reason", "acceptance", "hit_rate", "verify_s", "draft_s", "wire_s", "changes", "branch_s")
    class VerifySEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class DraftSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    BRANCH_S_FIELD_NUMBER: _ClassVar[int]
    policy: str
    sessions: int
    draft_tokens: int
    block_tokens: int
    reason: str
    acceptance: _containers.RepeatedScalarFieldContainer[float]
    hit_rate: float
    verify_s: _containers.ScalarMap[int, float]
    draft_s: _containers.ScalarMap[int, float]
    wire_s: float
    changes: int
    branch_s: float
    def __init__(self, policy: _Optional[str] = ..., sessions: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., acceptance: _Optional[_Iterable[float]] = ..., hit_rate: _Optional[float] = ..., verify_s: _Optional[_Mapping[int, float]] = ..., draft_s: _Optional[_Mapping[int, float]] = ..., wire_s: _Optional[float] = ..., changes: _Optional[int] = ..., branch_s: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
