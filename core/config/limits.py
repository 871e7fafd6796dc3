"""Limits of requests, queues and waits."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import ABOVE_0, Settings, at_least, whole
from core.records import PRIORITY

MAX_GRAMMAR_BYTES = 256 * 1024
"""Largest value of `max_grammar_bytes`: the stack on which grammars are compiled is large enough for texts up to this
length (workers/grammar/deep_stack.py)."""


@dataclass(frozen=True, slots=True)
class Limits(Settings):
    """Limits of one request, and of all requests together."""

    max_sessions: int = 128
    """Largest number of completions in progress on one orchestrator, at least 1; further ones wait in its queue. Raise
    it where engines have room for more sessions."""
    max_queued: int = 128
    """Largest number of completions that wait in one orchestrator's queue, at least 0. When it is full the request of
    the lowest priority is refused, among equals one of the caller that has most. With 0 nothing waits, which suits
    callers that retry elsewhere. Raise it where bursts are long and callers can wait."""
    max_sessions_per_caller: int = 0
    """Largest number of completions that one caller may have in progress on one orchestrator, at least 0; further ones
    wait in its queue, and others pass them. 0 sets no limit but `max_sessions`. Callers are told apart by their key;
    without keys all of them share the limit. The key of a caller may set its own limit (`tokens_file`). Set it where
    long outputs of one caller must not take every place."""
    max_requests_per_minute: int = 0
    """Largest number of completions that one caller may start on one orchestrator in a minute, at least 0; 0 sets no
    limit. Callers are told apart by their key; without keys all of them share the limit. The key of a caller may
    set its own limit (`tokens_file`). Set it where one caller must not crowd out others."""
    max_priority: int = 0
    """Most urgent priority (smallest number) that a request may have, in [-2147483648, 2147483647]; more urgent
    requests are refused. The key of a caller may set its own limit (`tokens_file`). Lower it where all callers may mark
    their requests as urgent."""
    max_tokens_per_minute: int = 0
    """Largest number of tokens, prompts and outputs together, that one caller may use on one orchestrator in a minute,
    at least 0; 0 sets no limit. A request counts with its `max_tokens` until it ends (one without, with 256 at most),
    then with its actual output. The key of a caller may set its own limit (`tokens_file`). Set it where one caller must
    not crowd out others."""
    retry_after_s: float = 1.0
    """Seconds, above 0, after which a refused caller should retry; longer if the queue is expected to take longer.
    Raise it where callers retry too often."""
    default_max_tokens: int | None = None
    """Limit of the output, in tokens, for requests without `max_tokens`, at least 1. If unset, a chat may fill the
    context, since models end their turn by themselves, and any other prompt gets 256. Set it where outputs of such
    requests become too long."""
    max_stop_strings: int = 16
    """Largest number of stop strings in a request, at least 0. Raise it where callers need more."""
    max_stop_chars: int = 256
    """Largest number of characters of a stop string, at least 1. Text that may be the beginning of a stop string is
    sent only when it is known not to be one, so that longer stop strings delay the output more. Raise it where callers
    need longer ones."""
    max_stop_token_ids: int = 128
    """Largest number of stop token ids in a request, at least 0. Raise it where callers need more."""
    max_logit_bias: int = 512
    """Largest number of tokens with a logit bias in a request, at least 0. Raise it where callers need more."""
    max_allowed_token_ids: int = 4096
    """Largest number of ids in the field `allowed_token_ids` of a request, at least 0. Raise it where callers need
    more."""
    max_bad_words: int = 128
    """Largest number of bad words in a request, strings and id sequences together, at least 0. Raise it where callers
    need more."""
    max_bad_word_tokens: int = 64
    """Largest number of tokens of one bad word, at least 0. Raise it where callers need longer ones."""
    max_logprobs: int = 20
    """Largest number of alternatives for which a request may have log probabilities, for each token, at least 0. Each
    costs bandwidth and time of the target. Raise it where callers need more."""
    max_scored_tokens: int = 4096
    """Longest prompt, in tokens, for which a request may have log probabilities of the prompt itself, at least 0. Each
    token costs a row of logits and a hundred bytes or more of the reply. Raise it to score longer prompts."""
    max_grammar_bytes: int = 64 * 1024
    """Largest JSON schema, regular expression, grammar or list of choices for structured output, in bytes, in [0,
    262144]; 0 refuses structured output. Raise it where schemas are large; compiling one may then take a CPU for a
    fraction of a second."""
    max_message_bytes: int = 4 * 1024 * 1024
    """Largest request message in bytes, at least 1; larger ones are refused before they are decoded. A JSON body may be
    six times as large, since an escape takes up to six bytes for one of text. Raise it where prompts are longer."""
    max_target_retries: int = 4
    """Number of times, at least 0, that a completion that has lost its target is moved to another one without any token
    in between; then it fails. Raise it where replacing a target takes long."""
    drain_grace_s: float = 30.0
    """Seconds, at least 0, that a completion stays on a target that is about to stop, before it moves to another. Keep
    it below the termination grace period of the target's pods."""
    lease_timeout_s: float = 30.0
    """Seconds, above 0, that a session waits for a replica to accept it, after which it fails. Raise it where
    autoscaling starts from 0 replicas."""
    reply_timeout_s: float = 60.0
    """Seconds, above 0, without a message after which an engine that has a request counts as lost. A working engine
    sends a heartbeat every second, between steps, even while the request waits in its queue. Keep it above 2, and above
    the duration of the longest step."""

    def __post_init__(self) -> None:
        self._check(at_least(1), "max_sessions", "max_stop_chars", "max_message_bytes", "default_max_tokens")
        self._check(at_least(0), "max_queued", "max_sessions_per_caller", "max_target_retries", "drain_grace_s")
        self._check(at_least(0), "max_requests_per_minute", "max_tokens_per_minute", "max_logprobs")
        self._check(at_least(0), "max_scored_tokens", "max_stop_strings", "max_stop_token_ids", "max_logit_bias")
        self._check(at_least(0), "max_allowed_token_ids", "max_bad_words", "max_bad_word_tokens")
        self._check(ABOVE_0, "retry_after_s", "lease_timeout_s", "reply_timeout_s")
        self._check(PRIORITY, "max_priority")
        self._check(whole(0, MAX_GRAMMAR_BYTES), "max_grammar_bytes")
