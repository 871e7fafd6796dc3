"""Both clients against the real ingress over real sockets: whatever breaks, and where, the caller sees one stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest, Overloaded, Unavailable, WorkerLost
from outrider_client import Chunk, NotFound, Retry, ServiceError
from outrider_client import InvalidRequest as ClientInvalidRequest
from tests.clients.story import Plan, Story, relay
from tests.deploy.grpc.rpc import ids_of, server
from tests.vocabularies import as_product, byte_fallback

pytestmark = pytest.mark.thorough

TEXT = "naïve 안녕 🙂👩‍💻 def stop — «end» "
IDS = ids_of(TEXT)
PIECES = as_product(byte_fallback())
ERRORS = [WorkerLost("the replica died"), Unavailable("no target"), RuntimeError("a defect")]
"""UNAVAILABLE twice, and INTERNAL."""

plans = st.lists(
    st.builds(
        Plan,
        sizes=st.lists(st.integers(1, 6), max_size=12).map(tuple),
        num_chunks=st.integers(0, 12),
        error=st.sampled_from(ERRORS),
    ),
    max_size=6,
)
repeated = settings(
    deadline=None,
    max_examples=settings.default.max_examples * 3 // 5,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

few = settings(repeated, max_examples=settings.default.max_examples // 4)


def joined(chunks: list[Chunk]) -> Chunk:
    """A stream as one chunk, without what depends on how often it was resumed."""
    last = chunks[-1]
    assert last.finish is not None
    assert all(chunk.finish is None for chunk in chunks[:-1])
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=sum((chunk.token_ids for chunk in chunks), ()),
        guessed=sum((chunk.guessed for chunk in chunks), ()),
        logprobs=sum((chunk.logprobs for chunk in chunks), ()),
        usage=last.usage,
        finish=replace(last.finish, speculation=None),
    )


def at_each_end(chunks: list[Chunk]) -> list[tuple[int, str]]:
    """The text up to the end of each chunk, with the number of tokens there."""
    return [(chunk.usage.completion_tokens, "".join(c.text for c in chunks[: i + 1])) for i, chunk in enumerate(chunks)]


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def story(request):
    if request.param == "byte-level":
        return Story(IDS)
    return Story(PIECES.encode("abc 안 de🙂f é — abc ghij", add_special_tokens=False), tokenizer=PIECES)


@pytest.fixture(scope="module")
def teller(story, kind):
    """One server and one client for many stories."""
    with server(story) as address:
        client = kind(address, retry=Retry(initial_backoff_s=0.001, max_backoff_s=0.002))
        yield client
        client.close()


@repeated
@given(
    plans=plans,
    stop=st.lists(st.sampled_from(["stop", "🙂", "e", " —", "«end», ", "zzz", "ij"]), max_size=2),
    include_stop=st.booleans(),
    max_tokens=st.integers(1, len(IDS)),
)
def test_a_stream_that_breaks_anywhere_is_the_stream_that_does_not(
    story, teller, plans, stop, include_stop, max_tokens
):
    fields = {
        "seed": 7,
        "logprobs": 1,
        "stop": stop,
        "include_stop": include_stop,
        "max_tokens": min(max_tokens, len(story.token_ids)),
    }
    story.plans, story.requests = [], []
    expected = teller.chunks(**fields)
    text_at = dict(at_each_end(expected))
    story.plans, story.requests = plans, []
    chunks = teller.chunks(**fields)
    assert joined(chunks) == joined(expected)
    for num_tokens, text in at_each_end(chunks):
        assert text == text_at[num_tokens], "text comes as early as in the stream that does not break"


@few
@given(plans=plans)
def test_all_calls_of_a_stream_are_one_request_though_the_caller_gave_no_seed(story, teller, plans):
    story.plans, story.requests = plans, []
    chunks = teller.chunks(temperature=1.0, max_tokens=len(story.token_ids))
    assert joined(chunks).token_ids == story.token_ids
    assert len({(request.request_id, request.sampling.seed) for request in story.requests}) == 1
    assert chunks[-1].finish.seed == story.requests[0].sampling.seed


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("num_chunks", [0, 1, 5])
def test_a_completion_counts_its_calls(connect, error, num_chunks):
    story = Story(IDS, [Plan(num_chunks=num_chunks, error=error)] * 3)
    with server(story) as address:
        completion = connect(address).generate(max_tokens=len(IDS))
    assert (completion.text, completion.token_ids) == (TEXT, IDS)
    assert completion.num_calls == len(story.requests) == 4
    assert [len(request.resume_tokens) for request in story.requests] == [num_chunks * i for i in range(4)]
    assert completion.usage.completion_tokens == len(IDS)
    assert completion.request_id == story.requests[0].request_id


def test_a_failure_after_the_last_chunk_is_none(connect):
    story = Story(IDS, [Plan(num_chunks=len(IDS), error=WorkerLost("too late"))])
    with server(story) as address:
        completion = connect(address, retry=Retry(max_retries=0)).generate(max_tokens=len(IDS))
    assert (completion.text, completion.num_calls) == (TEXT, 1)


def test_a_connection_that_is_reset_at_any_byte_breaks_nothing(connect):
    """Within the handshake, headers, a message, the status: bytes know nothing of chunks."""
    story = Story(IDS)
    with server(story) as address, relay(address) as between:
        client = connect(between.address, retry=Retry(initial_backoff_s=0.05))  # gRPC itself pauses for 0.1 s
        for limit in (0, 1, 20, 60, 100, 150, 175, 200, 240, 400, 800):
            between.limits = [limit]
            between.cut()
            assert client.generate(max_tokens=len(IDS)).text == TEXT, limit
        assert between.num_resets >= 9


def test_what_cannot_get_better_is_said_at_once(connect):
    story = Story(IDS, [Plan(num_chunks=2, error=InvalidRequest("sampling.top_p", "must be in (0, 1]"))])
    with server(story) as address, pytest.raises(ClientInvalidRequest, match=r"in \(0, 1\]"):
        connect(address).chunks(max_tokens=len(IDS))
    assert len(story.requests) == 1


def test_another_model_is_not_found(connect):
    with server(Story(IDS)) as address, pytest.raises(NotFound, match="'nobody'"):
        connect(address).chunks(model="nobody")


def test_an_error_that_stays_is_raised_when_retries_are_spent(connect):
    story = Story(IDS, [Plan(num_chunks=0, error=Unavailable("no target"))] * 9)
    with server(story) as address, pytest.raises(ServiceError, match=r"UNAVAILABLE: .*no target"):
        connect(address, retry=Retry(max_retries=3, initial_backoff_s=0.001)).chunks()
    assert len(story.requests) == 4


def test_an_overloaded_server_is_asked_again(connect):
    story = Story(IDS, [Plan(num_chunks=0, error=Overloaded("full", 0.01))] * 2)
    with server(story) as address:
        assert connect(address).generate(max_tokens=len(IDS)).num_calls == 3
