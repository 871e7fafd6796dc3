"""One stream over one or more calls. No I/O: takes messages and failures, and returns the next step.

    begin()                call the server with the returned request; then, for each event:
    take(message)          give the returned chunk to the caller
    broke(error), ended()  stop if `is_finished`, else wait the returned seconds and begin again; or raise

Why the caller's stream is unbroken: a chunk arrives whole or not at all, so the ids received are a prefix of the
output. The next call sends them as `resume_token_ids`, with the seed, and the server continues after them. The text has
no gap either: it depends on the tokens alone, so text held back when the first call broke comes with the second.

Must not know channels, threads or event loops; both clients use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from outrider_client._attempts import Attempts
from outrider_client._proto import generation_pb2 as pb
from outrider_client._replies import to_chunk
from outrider_client.errors import Inconsistent, OutriderError, ServiceError
from outrider_client.records import Chunk

RELAXED = (pb.VERIFICATION_LENIENT_COUPLED, pb.VERIFICATION_LENIENT_REJECTION, pb.VERIFICATION_TYPICAL)
"""Rules whose output cannot be resumed."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call for the client to make."""

    request: pb.GenerateRequest
    timeout_s: float | None


class Resumption:
    """The received part of one stream, and its continuation.

    Invariant: once `is_finished`, no method raises.
    """

    def __init__(self, request: pb.GenerateRequest, attempts: Attempts) -> None:
        self.is_finished = False
        self._request = request
        self._attempts = attempts
        self._num_samples = request.n if request.HasField("n") else 1
        self._received = _resumed(request) or [[] for _ in range(self._num_samples)]
        """Ids received, for each sample."""
        self._has_prompt_logprobs = False
        """Whether the first chunk of sample 0, which carries them, has been received."""
        self._finished: set[int] = set()
        self._repeated: set[int] = set()
        """Samples that finished before the current call; the server sends their last chunk again."""
        self._num_prompt_tokens: int | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_calls(self) -> int:
        return self._attempts.num_calls

    def begin(self) -> Call:
        """The call for the rest of the stream. Raises: DeadlinePassed."""
        timeout_s = self._attempts.begin()
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        self._repeated = set(self._finished)
        del request.resume_samples[:]
        if self._num_samples == 1:
            request.resume_token_ids[:] = self._received[0]
        elif any(self._received):
            request.resume_samples.extend(pb.TokenIds(ids=ids) for ids in self._received)
        if self._has_prompt_logprobs:
            request.ClearField("prompt_logprobs")
        if timeout_s is not None:
            request.timeout_s = timeout_s  # the deadline of a gRPC call does not reach the replica
        return Call(request, timeout_s)

    def take(self, message: pb.GenerateChunk) -> Chunk | None:
        """The next chunk; None if it only repeats the end of a finished sample.

        Raises: Inconsistent if the message does not continue the received output.
        """
        self._check(message)
        self._received[message.index].extend(message.token_ids)
        self._attempts.progressed()
        self._has_prompt_logprobs |= message.index == 0
        if message.index in self._repeated:
            self._repeated.remove(message.index)
            return None
        if message.HasField("finish"):
            self._finished.add(message.index)
            self.is_finished = len(self._finished) == self._num_samples
        return to_chunk(message)

    def ended(self) -> float:
        """Call this when the call ended with status OK. Returns and raises like `broke`."""
        return self.broke(ServiceError(grpc.StatusCode.DATA_LOSS, "the stream ended without saying how"))

    def broke(self, error: OutriderError) -> float:
        """Seconds to wait before the next call. Raises: `error` or DeadlinePassed if there is no next call.

        Ignores the error if the stream is finished.
        """
        if self.is_finished:
            return 0.0
        if any(self._received) and not self._is_repeatable:
            raise error
        return self._attempts.failed(error)

    @property
    def _is_repeatable(self) -> bool:
        """Whether the output can be resumed: not of a beam search, nor with a relaxed rule unless drafting is off."""
        if self._request.HasField("beams"):
            return False
        speculation = self._request.speculation
        is_plain = speculation.HasField("max_draft_tokens") and speculation.max_draft_tokens == 0
        return is_plain or speculation.verification not in RELAXED

    def _check(self, message: pb.GenerateChunk) -> None:
        """Raises: Inconsistent if the server's token count shows that a token was lost or repeated."""
        if message.index >= self._num_samples:
            raise _inconsistent(f"a sample of the index {message.index}, where {self._num_samples} were asked for")
        usage, num_received = message.usage, sum(map(len, self._received)) + len(message.token_ids)
        if message.index in self._finished - self._repeated:
            raise _inconsistent("a chunk after the last one")
        if usage.completion_tokens != num_received:
            raise _inconsistent(
                f"{num_received} tokens were received where the server counts {usage.completion_tokens}"
            )
        if usage.prompt_tokens != (self._num_prompt_tokens or usage.prompt_tokens):
            problem = f"a prompt of {usage.prompt_tokens} tokens, which had {self._num_prompt_tokens} before"
            raise _inconsistent(problem)
        self._num_prompt_tokens = usage.prompt_tokens


def _resumed(request: pb.GenerateRequest) -> list[list[int]]:
    """For each sample the ids that the caller already has; empty if none were given."""
    if request.resume_samples:
        return [list(output.ids) for output in request.resume_samples]
    return [list(request.resume_token_ids)] if request.resume_token_ids else []


def _inconsistent(problem: str) -> Inconsistent:
    return Inconsistent(grpc.StatusCode.DATA_LOSS, problem)
