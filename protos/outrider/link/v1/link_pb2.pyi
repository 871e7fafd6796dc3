from protos.outrider.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Want(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WANT_UNSPECIFIED: _ClassVar[Want]
    WANT_SAMPLES: _ClassVar[Want]
    WANT_FEATURES: _ClassVar[Want]
    WANT_GUESSES: _ClassVar[Want]
    WANT_PREFIX_FEATURES: _ClassVar[Want]

class Measure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEASURE_UNSPECIFIED: _ClassVar[Measure]
    MEASURE_MARGIN: _ClassVar[Measure]
    MEASURE_CONFIDENCE: _ClassVar[Measure]
    MEASURE_ENTROPY: _ClassVar[Measure]

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

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]
WANT_UNSPECIFIED: Want
WANT_SAMPLES: Want
WANT_FEATURES: Want
WANT_GUESSES: Want
WANT_PREFIX_FEATURES: Want
MEASURE_UNSPECIFIED: Measure
MEASURE_MARGIN: Measure
MEASURE_CONFIDENCE: Measure
MEASURE_ENTROPY: Measure
VERIFICATION_UNSPECIFIED: Verification
VERIFICATION_COUPLED: Verification
VERIFICATION_REJECTION: Verification
VERIFICATION_BLOCK: Verification
VERIFICATION_LENIENT_COUPLED: Verification
VERIFICATION_LENIENT_REJECTION: Verification
VERIFICATION_TYPICAL: Verification
VERIFICATION_RECURSIVE_REJECTION: Verification
VERIFICATION_SEQUENTIAL_SELECTION: Verification
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind

class Challenge(_message.Message):
    __slots__ = ("version", "nonce")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    nonce: bytes
    def __init__(self, version: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "epoch", "nonce", "proof")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    nonce: bytes
    proof: bytes
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class Requests(_message.Message):
    __slots__ = ("verify", "draft", "offers")
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    verify: _containers.RepeatedCompositeFieldContainer[VerifyRequest]
    draft: _containers.RepeatedCompositeFieldContainer[DraftRequest]
    offers: _containers.RepeatedCompositeFieldContainer[Continuation]
    def __init__(self, verify: _Optional[_Iterable[_Union[VerifyRequest, _Mapping]]] = ..., draft: _Optional[_Iterable[_Union[DraftRequest, _Mapping]]] = ..., offers: _Optional[_Iterable[_Union[Continuation, _Mapping]]] = ...) -> None: ...

class Replies(_message.Message):
    __slots__ = ("replies", "lost", "working")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    WORKING_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    lost: str
    working: _containers.RepeatedCompositeFieldContainer[Stamp]
    def __init__(self, replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ..., lost: _Optional[str] = ..., working: _Optional[_Iterable[_Union[Stamp, _Mapping]]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("stamp", "verdict", "missing", "refused", "draft_update")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_UPDATE_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    verdict: Verdict
    missing: Missing
    refused: Refused
    draft_update: DraftUpdate
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., missing: _Optional[_Union[Missing, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., draft_update: _Optional[_Union[DraftUpdate, _Mapping]] = ...) -> None: ...

class Stamp(_message.Message):
    __slots__ = ("lease", "epoch", "round")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    lease: str
    epoch: int
    round: int
    def __init__(self, lease: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("num_tokens", "prefix_hash")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    prefix_hash: int
    def __init__(self, num_tokens: _Optional[int] = ..., prefix_hash: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("stamp", "base", "suffix", "block", "spec", "wants")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    base: Base
    suffix: _containers.RepeatedScalarFieldContainer[int]
    block: TokenTree
    spec: SequenceSpec
    wants: _containers.RepeatedScalarFieldContainer[Want]
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., base: _Optional[_Union[Base, _Mapping]] = ..., suffix: _Optional[_Iterable[int]] = ..., block: _Optional[_Union[TokenTree, _Mapping]] = ..., spec: _Optional[_Union[SequenceSpec, _Mapping]] = ..., wants: _Optional[_Iterable[_Union[Want, str]]] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("stamp", "after", "tree", "is_open")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    after: int
    tree: TokenTree
    is_open: bool
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., after: _Optional[int] = ..., tree: _Optional[_Union[TokenTree, _Mapping]] = ..., is_open: _Optional[bool] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("stamp", "base", "suffix", "growth", "spec", "features")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    stamp: Stamp
    base: Base
    suffix: _containers.RepeatedScalarFieldContainer[int]
    growth: TreeSpec
    spec: SequenceSpec
    features: Features
    def __init__(self, stamp: _Optional[_Union[Stamp, _Mapping]] = ..., base: _Optional[_Union[Base, _Mapping]] = ..., suffix: _Optional[_Iterable[int]] = ..., growth: _Optional[_Union[TreeSpec, _Mapping]] = ..., spec: _Optional[_Union[SequenceSpec, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("first", "width", "rows")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    first: int
    width: int
    rows: bytes
    def __init__(self, first: _Optional[int] = ..., width: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class Guesses(_message.Message):
    __slots__ = ("tokens", "parents", "chances")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    chances: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., chances: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenTree(_message.Message):
    __slots__ = ("tokens", "parents", "q")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    q: Distributions
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[Distributions, _Mapping]] = ...) -> None: ...

class Distributions(_message.Message):
    __slots__ = ("lengths", "token_ids", "probs", "draw_lengths", "draws", "of_nodes")
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAW_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    OF_NODES_FIELD_NUMBER: _ClassVar[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    probs: bytes
    draw_lengths: _containers.RepeatedScalarFieldContainer[int]
    draws: _containers.RepeatedScalarFieldContainer[int]
    of_nodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lengths: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., probs: _Optional[bytes] = ..., draw_lengths: _Optional[_Iterable[int]] = ..., draws: _Optional[_Iterable[int]] = ..., of_nodes: _Optional[_Iterable[int]] = ...) -> None: ...

class TreeSpec(_message.Message):
    __slots__ = ("rows_per_pass", "max_depth", "min_path_prob", "calibration_offset", "calibration_slope", "tail", "reports_all", "num_passes", "fanout", "measure", "min_confidence")
    ROWS_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MIN_PATH_PROB_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_SLOPE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    REPORTS_ALL_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    FANOUT_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    MIN_CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    rows_per_pass: int
    max_depth: int
    min_path_prob: float
    calibration_offset: float
    calibration_slope: float
    tail: _containers.RepeatedScalarFieldContainer[float]
    reports_all: bool
    num_passes: int
    fanout: int
    measure: Measure
    min_confidence: float
    def __init__(self, rows_per_pass: _Optional[int] = ..., max_depth: _Optional[int] = ..., min_path_prob: _Optional[float] = ..., calibration_offset: _Optional[float] = ..., calibration_slope: _Optional[float] = ..., tail: _Optional[_Iterable[float]] = ..., reports_all: _Optional[bool] = ..., num_passes: _Optional[int] = ..., fanout: _Optional[int] = ..., measure: _Optional[_Union[Measure, str]] = ..., min_confidence: _Optional[float] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("prompt_len", "sampling", "verification", "num_logprobs", "lenience", "num_prompt_logprobs", "grammar", "adapter", "num_source", "num_likeliest", "learning")
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_LIKELIEST_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    prompt_len: int
    sampling: Sampling
    verification: Verification
    num_logprobs: int
    lenience: float
    num_prompt_logprobs: int
    grammar: Grammar
    adapter: Adapter
    num_source: int
    num_likeliest: int
    learning: bool
    def __init__(self, prompt_len: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., verification: _Optional[_Union[Verification, str]] = ..., num_logprobs: _Optional[int] = ..., lenience: _Optional[float] = ..., num_prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., num_source: _Optional[int] = ..., num_likeliest: _Optional[int] = ..., learning: _Optional[bool] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("params", "min_tokens", "suppressed_ids")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_IDS_FIELD_NUMBER: _ClassVar[int]
    params: _generation_pb2.SamplingParams
    min_tokens: int
    suppressed_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, params: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., min_tokens: _Optional[int] = ..., suppressed_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("waited_s", "computed_s", "num_passes", "num_rows", "num_sessions", "guessing_s")
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GUESSING_S_FIELD_NUMBER: _ClassVar[int]
    waited_s: float
    computed_s: float
    num_passes: int
    num_rows: int
    num_sessions: int
    guessing_s: float
    def __init__(self, waited_s: _Optional[float] = ..., computed_s: _Optional[float] = ..., num_passes: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_sessions: _Optional[int] = ..., guessing_s: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("path", "next_token", "held", "logprobs", "timing", "continued", "num_relaxed", "samples", "num_cached", "features", "guesses", "likeliest", "prompt_logprobs")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RELAXED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    LIKELIEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[int]
    next_token: int
    held: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    timing: Timing
    continued: int
    num_relaxed: int
    samples: _containers.RepeatedScalarFieldContainer[int]
    num_cached: int
    features: Features
    guesses: Guesses
    likeliest: _containers.RepeatedCompositeFieldContainer[Likeliest]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, path: _Optional[_Iterable[int]] = ..., next_token: _Optional[int] = ..., held: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., continued: _Optional[int] = ..., num_relaxed: _Optional[int] = ..., samples: _Optional[_Iterable[int]] = ..., num_cached: _Optional[int] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., guesses: _Optional[_Union[Guesses, _Mapping]] = ..., likeliest: _Optional[_Iterable[_Union[Likeliest, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Likeliest(_message.Message):
    __slots__ = ("ids", "logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class DraftUpdate(_message.Message):
    __slots__ = ("held", "first", "parents", "tokens", "ranks", "chances", "confidences", "timing", "root", "is_over", "q")
    HELD_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    held: int
    first: int
    parents: bytes
    tokens: bytes
    ranks: bytes
    chances: bytes
    confidences: bytes
    timing: Timing
    root: int
    is_over: bool
    q: Distributions
    def __init__(self, held: _Optional[int] = ..., first: _Optional[int] = ..., parents: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., chances: _Optional[bytes] = ..., confidences: _Optional[bytes] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., root: _Optional[int] = ..., is_over: _Optional[bool] = ..., q: _Optional[_Union[Distributions, _Mapping]] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: int
    def __init__(self, held: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "is_final", "field")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_final: bool
    field: str
    def __init__(self, reason: _Optional[str] = ..., is_final: _Optional[bool] = ..., field: _Optional[str] = ...) -> None: ...
