"""The core of both clients, without any I/O."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_client import DeadlinePassed, Inconsistent, InvalidRequest, Retry, ServiceError
from outrider_client._attempts import Attempts, RetryBudget
from outrider_client._proto import generation_pb2 as pb
from outrider_client._resume import Resumption

LOST = ServiceError(grpc.StatusCode.UNAVAILABLE, "gone")
PROMPT_TOKENS = 3


def resumption(request=None, *, timeout_s=None, now=lambda: 0.0, **retry):
    request = request or pb.GenerateRequest(text="x", request_id="r", sampling=pb.SamplingParams(seed=7))
    options = Retry(**retry)
    return Resumption(request, Attempts(options, RetryBudget(options.budget), timeout_s, now, lambda: 0.5))


def chunk(ids, completion_tokens, *, is_last=False, prompt_tokens=PROMPT_TOKENS):
    message = pb.GenerateChunk(
        text=f"<{ids}>", token_ids=ids, usage=pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    )
    if is_last:
        message.finish.reason = pb.FINISH_REASON_LENGTH
    return message


def served(request, output, size):
    """A server's answer, in chunks of `size`."""
    position = len(request.resume_token_ids)
    assert list(request.resume_token_ids) == output[:position]
    while position < len(output):
        ids = output[position : position + size]
        position += len(ids)
        yield chunk(ids, position, is_last=position == len(output))


@given(output=st.lists(st.integers(0, 9), min_size=1, max_size=30), data=st.data())
def test_however_calls_break_the_caller_gets_each_token_once_and_in_order(output, data):
    stream, received = resumption(max_retries=3), []
    while not stream.is_finished:
        request, size = stream.begin().request, data.draw(st.integers(1, 5))
        assert (request.text, request.request_id, request.sampling.seed) == ("x", "r", 7)
        # Progress is made each time, for else retries run out, as they should.
        num_chunks = data.draw(st.integers(1, 8))
        for message, _ in zip(served(request, output, size), range(num_chunks), strict=False):
            received += stream.take(message).token_ids
        stream.broke(LOST) if data.draw(st.booleans()) else stream.ended()
    assert received == output


def served_samples(request, outputs, sizes):
    """A server's answer to a request for several samples, one after the other in turn, by chunks of a size each."""
    resumed = [list(each.ids) for each in request.resume_samples] or [[] for _ in outputs]
    assert resumed == [output[: len(own)] for own, output in zip(resumed, outputs, strict=True)]
    assert not request.resume_token_ids
    positions, left = [len(own) for own in resumed], set(range(len(outputs)))
    while left:
        for index in sorted(left):
            output, position = outputs[index], positions[index]
            ids = output[position : position + sizes[index]]
            positions[index] += len(ids)
            is_last = positions[index] == len(output)
            message = chunk(ids, sum(positions), is_last=is_last)
            message.index = index
            left -= {index} if is_last else set()
            yield message


@given(outputs=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=2, max_size=4), data=st.data())
def test_however_calls_break_each_sample_comes_once_and_in_order(outputs, data):
    request = pb.GenerateRequest(text="x", n=len(outputs), sampling=pb.SamplingParams(seed=7))
    stream, received, num_finished = resumption(request, max_retries=3), [[] for _ in outputs], 0
    sizes = [data.draw(st.integers(1, 5)) for _ in outputs]
    while not stream.is_finished:
        answer = served_samples(stream.begin().request, outputs, sizes)
        num_chunks = data.draw(st.integers(len(outputs), 12))  # so that progress is made, for else retries run out
        for message, _ in zip(answer, range(num_chunks), strict=False):
            if (piece := stream.take(message)) is not None:
                received[piece.index] += piece.token_ids
                num_finished += piece.finish is not None
        stream.broke(LOST)
    assert received == outputs
    assert num_finished == len(outputs)


def test_the_prompt_is_scored_once_however_often_the_stream_breaks():
    stream = resumption(pb.GenerateRequest(text="x", prompt_logprobs=2, resume_token_ids=[9]))
    assert stream.begin().request.prompt_logprobs == 2
    stream.broke(LOST)
    assert stream.begin().request.prompt_logprobs == 2, "nothing has come yet"
    stream.take(chunk([1], 2))
    stream.broke(LOST)
    assert not stream.begin().request.HasField("prompt_logprobs")


def test_a_sample_that_was_not_asked_for_or_goes_on_after_its_end_is_inconsistent():
    stream = resumption(pb.GenerateRequest(text="x", n=2))
    stream.begin()
    stream.take(chunk([1], 1, is_last=True))
    with pytest.raises(Inconsistent, match="after the last"):
        stream.take(chunk([1], 2))
    wrong = chunk([1], 2)
    wrong.index = 2
    with pytest.raises(Inconsistent, match="index 2"):
        stream.take(wrong)


def test_a_beam_search_begins_again_until_it_has_an_output():
    stream = resumption(pb.GenerateRequest(text="x", n=2, beams=pb.BeamParams(beam_width=2)))
    stream.begin()
    stream.broke(LOST)
    assert not stream.begin().request.resume_samples
    stream.take(chunk([5], 1))
    with pytest.raises(ServiceError, match="gone"):
        stream.broke(LOST)


@pytest.mark.parametrize("name", ["LENIENT_COUPLED", "LENIENT_REJECTION", "TYPICAL"])
def test_a_stream_of_a_relaxed_rule_begins_again_but_does_not_go_on(name):
    """Its output depends on the guesses that were seen, so no server continues it; plain decoding does not."""
    speculation = pb.SpeculationParams(verification=f"VERIFICATION_{name}")
    stream = resumption(pb.GenerateRequest(text="x", speculation=speculation))
    stream.begin()
    stream.broke(LOST)
    stream.begin()
    stream.take(chunk([5], 1))
    with pytest.raises(ServiceError, match="gone"):
        stream.broke(LOST)
    speculation.max_draft_tokens = 0
    plain = resumption(pb.GenerateRequest(text="x", speculation=speculation))
    plain.begin()
    plain.take(chunk([5], 1))
    plain.broke(LOST)
    assert list(plain.begin().request.resume_token_ids) == [5]


def test_after_the_last_chunk_no_failure_matters():
    stream = resumption(max_retries=0)
    stream.begin()
    stream.take(chunk([1], 1, is_last=True))
    assert stream.is_finished
    assert stream.broke(LOST) == 0.0
    assert stream.ended() == 0.0
    assert stream.broke(InvalidRequest(grpc.StatusCode.INVALID_ARGUMENT, "no")) == 0.0


def test_a_stream_that_ends_without_a_last_chunk_goes_on():
    stream = resumption()
    stream.begin()
    stream.take(chunk([1, 2], 2))
    stream.ended()
    assert not stream.is_finished
    assert list(stream.begin().request.resume_token_ids) == [1, 2]


def test_a_stream_that_never_says_how_it_ends_fails_in_the_end():
    stream = resumption(max_retries=2)
    for _ in range(2):
        stream.begin()
        stream.ended()
    stream.begin()
    with pytest.raises(ServiceError, match="without saying how"):
        stream.ended()


def test_a_stream_that_goes_on_is_not_given_up_however_often_it_breaks():
    stream = resumption(max_retries=1, budget=1)
    for total in range(1, 6):
        stream.begin()
        stream.take(chunk([7], total))
        stream.broke(LOST)
    stream.begin()
    with pytest.raises(ServiceError):
        stream.broke(LOST)


def test_output_that_the_caller_brought_is_sent_with_all_calls_and_not_given_back():
    stream = resumption(pb.GenerateRequest(text="x", resume_token_ids=[8, 9]))
    assert list(stream.begin().request.resume_token_ids) == [8, 9]
    assert stream.take(chunk([1], 3)).token_ids == (1,)
    stream.broke(LOST)
    assert list(stream.begin().request.resume_token_ids) == [8, 9, 1]


def test_what_is_left_of_the_time_goes_with_each_call():
    times = iter([0.0, 0.0, 4.0, 4.0])
    stream = resumption(timeout_s=10.0, now=lambda: next(times))
    first = stream.begin()
    assert (first.timeout_s, first.request.timeout_s) == (10.0, 10.0)
    stream.broke(LOST)
    second = stream.begin()
    assert (second.timeout_s, second.request.timeout_s) == (6.0, 6.0)


def test_without_a_limit_no_time_is_sent():
    call = resumption().begin()
    assert call.timeout_s is None
    assert not call.request.HasField("timeout_s")


def test_a_stream_whose_time_is_over_does_not_go_on():
    times = iter([0.0, 0.0, 10.0])
    stream = resumption(timeout_s=10.0, now=lambda: next(times))
    stream.begin()
    with pytest.raises(DeadlinePassed):
        stream.broke(LOST)


@pytest.mark.parametrize(
    "wrong",
    [
        chunk([3], 2),  # one was repeated
        chunk([3], 4),  # one was lost
        chunk([3], 3, prompt_tokens=PROMPT_TOKENS + 1),  # another prompt: another tokenizer, or another chat template
    ],
    ids=["repeated", "lost", "another prompt"],
)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_does_not_follow_is_refused(wrong, is_resumed):
    stream = resumption()
    stream.begin()
    stream.take(chunk([1, 2], 2))
    if is_resumed:
        stream.broke(LOST)
        stream.begin()
    with pytest.raises(Inconsistent):
        stream.take(wrong)


def test_nothing_may_follow_the_last_chunk():
    stream = resumption()
    stream.begin()
    stream.take(chunk([1], 1, is_last=True))
    with pytest.raises(Inconsistent):
        stream.take(chunk([2], 2))
