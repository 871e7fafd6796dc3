"""Both ends of a link, over real sockets: what arrives, and that whatever is wrong with one link harms no other."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import uvloop

from core.errors import StartupError, WorkerLost
from core.records import Base, DraftRequest, DraftUpdate, Refused, Sampling, SequenceSpec, Stamp, VerifyRequest
from core.speculation.growth import NewNodes, TreeSpec
from core.speculation.token_tree import TokenTree
from deploy.link import client, handshake, server
from deploy.link.address import LinkAddress
from deploy.link.client import Link
from deploy.link.handshake import answer, challenge
from deploy.link.replies import encode_replies
from deploy.link.requests import encode_requests
from deploy.link.server import LinkServer
from deploy.link.stream import MAX_FRAME_BYTES, LinkError, framed
from deploy.link.tls import Certificates
from protos.outrider.link.v1 import link_pb2 as pb
from tests.deploy.fake_engines import FAIL, SLOW, FakeTargetEngine
from tests.deploy.link.certificates import Authority
from tests.deploy.link.listening import ANY_PORT, listen
from tests.exchange import replies_of
from workers.engine.thread import EngineLoop

pytestmark = pytest.mark.thorough

EPOCH = 2**61 + 5
KEY = b"k" * 32
SPEC = SequenceSpec(prompt_len=2, sampling=Sampling())


def request(session: str = "a", last: int = 2, block: TokenTree | None = None) -> VerifyRequest:
    return VerifyRequest(Stamp(session, EPOCH, 1), Base(0, 0), (1, last), block or TokenTree(), SPEC)


@pytest.fixture
async def engine():
    loop = EngineLoop(FakeTargetEngine(EPOCH))
    loop.start()
    yield loop
    await loop.close()


@pytest.fixture(params=["plain", "tls"])
def certificates(request, tmp_path_factory):
    """Tests of links run with TLS, too."""
    return Certificates(Authority().issue(tmp_path_factory.mktemp("tls"))) if request.param == "tls" else None


@pytest.fixture
async def address(engine, certificates):
    listener, address = listen(engine.post, VerifyRequest, EPOCH, certificates)
    yield address
    listener.close()
    await asyncio.sleep(0.02)  # until both ends have seen it


@pytest.fixture
async def link(address, certificates):
    link = await Link.open(address, certificates)
    yield link
    link.close("the test is over")


async def next_tokens(link, *requests):
    return [reply.next_token for reply in await replies_of(link, requests)]


async def test_replies_come_in_the_order_of_the_requests(link):
    replies = await replies_of(link, [request("a", 7), request("b", 3, TokenTree.chain([4, 5, 9]))])
    assert [(reply.stamp.lease, reply.next_token) for reply in replies] == [("a", 8), ("b", 6)]
    assert replies[1].path == (0, 1)
    assert await replies_of(link, []) == []


async def test_calls_that_are_under_way_together_get_their_own_replies(link, address, certificates):
    other = await Link.open(address, certificates)
    calls = [
        next_tokens(each, request(f"{number} {way}", number))
        for number in range(20)
        for way, each in enumerate((link, other))
    ]
    assert await asyncio.gather(*calls) == [[number + 1] for number in range(20) for _ in range(2)]
    other.close("it is not needed")


async def test_who_gives_up_does_not_disturb_the_others(link):
    gone = asyncio.create_task(link.exchange([request("a", SLOW)], print))
    await asyncio.sleep(0.05)
    gone.cancel()
    assert await next_tokens(link, request("b", 5)) == [6]
    assert not link._open, "what nobody waits for is not kept"


async def test_an_engine_that_fails_says_why_to_all_who_wait(link, address, certificates):
    other = await Link.open(address, certificates)
    waiting = asyncio.create_task(replies_of(other, [request("b", SLOW)]))
    await asyncio.sleep(0.05)
    with pytest.raises(WorkerLost, match="told to fail"):
        await link.exchange([request("a", FAIL)], print)
    outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
    assert "told to fail" in str(outcome) or outcome[0].next_token == SLOW + 1, "it may have been answered before"
    with pytest.raises(WorkerLost, match="told to fail"):
        await other.exchange([request("b", 5)], print)
    assert link.is_closed
    with pytest.raises(WorkerLost, match="told to fail"):
        await link.exchange([request("a", 5)], print)


async def test_a_connection_that_breaks_is_a_lost_engine_to_who_waits(link):
    waiting = asyncio.create_task(link.exchange([request("a", SLOW)], print))
    await asyncio.sleep(0.05)
    link._transport.abort()
    with pytest.raises(WorkerLost, match=r"closed the link|broke"):
        await waiting
    with pytest.raises(WorkerLost):
        await link.exchange([request()], print)


async def test_a_request_that_no_frame_can_carry_is_refused_and_the_rest_of_its_batch_is_sent(link, monkeypatch):
    monkeypatch.setattr(client, "framed", lambda content: framed(content, 200))
    long = replace(request("long"), suffix=tuple(range(1000)))
    first, refused, last = await replies_of(link, [request("a", 5), long, request("b", 6)])
    assert (first.next_token, last.next_token) == (6, 7)
    assert isinstance(refused, Refused)
    assert refused.field == "prompt"
    assert "the request is too long for a link: a frame of " in refused.reason
    assert await next_tokens(link, request("c", 5)) == [6]


async def test_requests_that_are_too_long_together_go_in_several_frames(link, monkeypatch):
    monkeypatch.setattr(client, "framed", lambda content: framed(content, 120))
    assert await next_tokens(link, *(request(f"{n}", n) for n in range(9))) == list(range(1, 10))


async def test_replies_that_are_too_long_together_come_one_after_the_other(link, monkeypatch):
    monkeypatch.setattr(server, "framed", lambda content: framed(content, 120))
    assert await next_tokens(link, *(request(f"{n}", n) for n in range(9))) == list(range(1, 10))


async def test_replies_larger_than_the_sockets_buffers_arrive_whole(link):
    """The engine's thread writes what the kernel takes, and the event loop the rest; the order is kept."""
    requests = [request("s" * 300_000 + str(number), number) for number in range(20)]
    assert await asyncio.gather(*(next_tokens(link, each) for each in requests)) == [[n + 1] for n in range(20)]


async def test_an_engine_reads_no_more_while_too_many_requests_wait(link, monkeypatch):
    monkeypatch.setattr(server, "MAX_OPEN_REQUESTS", 2)
    slow = asyncio.create_task(next_tokens(link, request("slow", SLOW)))
    rest = [asyncio.create_task(next_tokens(link, request(f"{n}", n))) for n in range(12)]
    assert await slow == [SLOW + 1]
    assert await asyncio.gather(*rest) == [[n + 1] for n in range(12)]


async def test_who_does_not_read_is_cut_off_and_others_are_served(
    engine, address, certificates, link, caplog, monkeypatch
):
    monkeypatch.setattr("deploy.link.stream.MAX_UNSENT_BYTES", 10_000)
    _, writer = await admitted(address, certificates)
    writer.transport.pause_reading()
    for number in range(40):
        writer.write(framed(encode_requests([request("s" * 200_000 + str(number), 5)])))
    await until_logged(caplog, "does not read", "timed out")  # by the kernel, where that is the first to notice
    assert await next_tokens(link, request("a", 5)) == [6]
    writer.transport.abort()


# Strangers, and what they send


async def stranger(address, certificates):
    """A connection that has been challenged."""
    tls = certificates.for_orchestrator() if certificates is not None else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    return reader, writer, pb.Challenge.FromString(await read_frame(reader))


async def admitted(address, certificates):
    reader, writer, challenged = await stranger(address, certificates)
    writer.write(framed(answer(challenged, address).SerializeToString()))
    pb.Welcome.FromString(await read_frame(reader))
    return reader, writer


async def read_frame(reader):
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


async def until_logged(caplog, *texts):
    """Any of these."""
    while not any(text in message for message in caplog.messages for text in texts):  # noqa: ASYNC110  no event
        await asyncio.sleep(0.01)


async def is_closed(reader):
    try:
        return await asyncio.wait_for(reader.read(), 60) == b""
    except ConnectionResetError:
        return True


def hello(challenged, address, **changes):
    message = answer(challenged, address)
    for name, value in changes.items():
        setattr(message, name, value)
    return framed(message.SerializeToString())


STRANGERS = {
    "garbage": (lambda c, a: b"GET / HTTP/1.1\r\nHost: me\r\n\r\n", "a frame of 1195725856 bytes"),
    "a frame that is no message": (lambda c, a: framed(b"\xff" * 40), "a frame that is not a Hello"),
    "an empty frame": (lambda c, a: framed(b""), "speaks version 0"),
    "another version": (
        lambda c, a: hello(c, a, version=handshake.VERSION + 1),
        f"speaks version {handshake.VERSION + 1} of the protocol, this end {handshake.VERSION}",
    ),
    "no proof": (lambda c, a: hello(c, a, proof=b""), "the orchestrator.s key is not"),
    "another key": (lambda c, a: hello(c, replace(a, key=b"x" * 32)), "the orchestrator.s key is not"),
    "another nonce than it proves": (lambda c, a: hello(c, a, nonce=b"x" * 32), "the orchestrator.s key is not"),
    "a short nonce": (lambda c, a: hello(c, a, nonce=b"x"), "a nonce without 32 bytes"),
    "another engine's epoch": (lambda c, a: hello(c, replace(a, epoch=7)), "wants engine 0000000000000007"),
    "a proof for another connection": (lambda c, a: hello(challenge(), a), "the orchestrator.s key is not"),
    "requests before its hello": (lambda c, a: framed(encode_requests([request()])), "not a Hello|version"),
    "a long frame": (lambda c, a: framed(b"x" * 257), "257 bytes; at most 256"),
}


@pytest.mark.parametrize("what", STRANGERS)
async def test_a_stranger_is_shut_out_with_one_line_and_harms_nobody(what, address, certificates, link, caplog):
    bytes_of, reason = STRANGERS[what]
    reader, writer, challenged = await stranger(address, certificates)
    writer.write(bytes_of(challenged, address) + b"\0" * 100)
    assert await is_closed(reader)
    writer.close()
    (line,) = [record for record in caplog.records if record.name.startswith("deploy.link")]
    assert line.getMessage().startswith("the link from 127.0.0.1:")
    assert re.search(reason, line.getMessage())
    assert await next_tokens(link, request("a", 5)) == [6]


FRIENDS = {
    "a frame above the limit": (lambda: (MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "at most 67108864"),
    "a frame that is no message": (lambda: framed(b"\xff" * 9), "not a Requests"),
    "what only a draft does": (
        lambda: framed(encode_requests([DraftRequest(Stamp("a", EPOCH, 1), Base(0, 0), (1,), TreeSpec(1, 1))])),
        "only a VerifyRequest",
    ),
    "a tree that is none": (
        lambda: framed(pb.Requests(verify=[{"block": {"tokens": [1], "parents": [5]}}]).SerializeToString()),
        "parents before their children",
    ),
}


@pytest.mark.parametrize("what", FRIENDS)
async def test_who_has_been_let_in_and_sends_nonsense_is_shut_out_alike(what, address, certificates, link, caplog):
    bytes_of, reason = FRIENDS[what]
    reader, writer = await admitted(address, certificates)
    writer.write(bytes_of())
    assert await is_closed(reader)
    writer.close()
    (line,) = [record for record in caplog.records if record.name.startswith("deploy.link")]
    assert reason in line.getMessage()
    assert await next_tokens(link, request("a", 5)) == [6]


async def test_a_frame_that_ends_half_way_is_told(address, certificates, link, caplog):
    _, writer = await admitted(address, certificates)
    writer.write(framed(encode_requests([request()]))[:-1])
    writer.close()
    await until_logged(caplog, "the peer closed it within a frame")
    assert await next_tokens(link, request("a", 5)) == [6]


async def test_an_orchestrator_that_leaves_between_frames_is_no_news(address, certificates, link, caplog):
    _, writer = await admitted(address, certificates)
    writer.close()
    await writer.wait_closed()
    assert await next_tokens(link, request("a", 5)) == [6]
    assert not caplog.records


async def test_who_says_nothing_is_shut_out_after_a_while(address, certificates, link, caplog, monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.1)
    reader, writer, _ = await stranger(address, certificates)
    assert await is_closed(reader)
    writer.close()
    assert "has not ended its handshake" in caplog.text
    assert await next_tokens(link, request("a", 5)) == [6]


async def test_strangers_do_not_take_all_places(address, certificates, link, caplog, monkeypatch):
    monkeypatch.setattr(server, "MAX_PENDING", 2)
    quiet = [await stranger(address, certificates) for _ in range(2)]
    reader, writer = await asyncio.open_connection(address.host, address.port)
    assert await is_closed(reader)
    assert await next_tokens(link, request("a", 5)) == [6]
    for _, waiting, _ in [*quiet, (None, writer, None)]:
        waiting.close()


# Engines that are none


@asynccontextmanager
async def listening(talk):
    """Where somebody listens who does `talk(reader, writer)` and then waits for the other end to leave."""
    writers = []

    async def serve(reader, writer):
        writers.append(writer)
        with suppress(ConnectionError):
            await talk(reader, writer)
            await reader.read()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield LinkAddress("127.0.0.1", listener.sockets[0].getsockname()[1], EPOCH, KEY)
    listener.close()
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0.02)


def lying_engine(lie):
    """An engine's end that welcomes, and then answers the first request with `lie`."""

    async def talk(reader, writer):
        challenged = challenge()
        writer.write(framed(challenged.SerializeToString()))
        said = pb.Hello.FromString(await read_frame(reader))
        writer.write(framed(handshake.admit(said, challenged, EPOCH, KEY).SerializeToString()))
        await read_frame(reader)
        writer.write(lie)

    return listening(talk)


GROWN = DraftUpdate(Stamp("a", EPOCH, 1), NewNodes(0), 2, is_over=True)
LIES = {
    "garbage": b"\xff" * 30,
    "a frame that is no message": framed(b"\xff" * 9),
    "a reply without content": framed(pb.Replies(replies=[{}]).SerializeToString()),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_engine_that_talks_nonsense_is_lost(lie):
    async with lying_engine(LIES[lie]) as address:
        link = await Link.open(address)
        with pytest.raises(WorkerLost, match="the link is closed: "):
            await link.exchange([request()], print)
        assert link.is_closed


async def test_replies_to_nobodys_request_are_dropped():
    lie = framed(encode_replies([replace(GROWN, stamp=Stamp("b", EPOCH, 1)), GROWN, GROWN]))
    async with lying_engine(lie) as address:
        link = await Link.open(address)
        assert await replies_of(link, [request()]) == [GROWN]
        link.close("done")


@pytest.mark.parametrize(
    ("first", "then", "problem"),
    [
        (challenge(), pb.Welcome(proof=b"x" * 32), "does not know the engine's key"),
        (
            pb.Challenge(version=handshake.VERSION + 1, nonce=b"x" * 32),
            None,
            f"speaks version {handshake.VERSION + 1} of the protocol",
        ),
        (pb.Challenge(version=handshake.VERSION, nonce=b"x"), None, "a nonce without 32 bytes"),
        (pb.Challenge(version=handshake.VERSION, nonce=b"x" * 300), None, "at most 256"),
    ],
)
async def test_who_is_no_engine_of_ours_is_not_spoken_to(first, then, problem):
    async def talk(reader, writer):
        writer.write(framed(first.SerializeToString()))
        if then is not None:
            await read_frame(reader)
            writer.write(framed(then.SerializeToString()))

    async with listening(talk) as address:
        with pytest.raises(LinkError, match=problem):
            await Link.open(address)


async def test_who_accepts_and_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(client, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def talk(reader, writer):
        pass

    async with listening(talk) as address:
        with pytest.raises(LinkError, match=r"no answer within 0\.1 s"):
            await Link.open(address)


# Ports


async def test_the_first_free_port_of_the_range_is_taken(engine, address):
    first = LinkServer(EPOCH, (VerifyRequest,))
    used = rf"ports {address.port} to {address.port} of 127\.0\.0\.1 are all in use; engine\.link_ports sets others"
    with pytest.raises(StartupError, match=used):
        first.bind("127.0.0.1", (address.port, address.port))
    first.bind("127.0.0.1", (address.port, address.port + 50))
    assert first.start(engine.post).port > address.port
    first.close()


def test_an_address_that_is_not_this_machines_ends_the_start():
    with pytest.raises(StartupError, match=r"cannot listen for links at 192\.0\.2\.1 port 0: "):
        LinkServer(EPOCH, (VerifyRequest,)).bind("192.0.2.1", ANY_PORT)


async def test_a_key_is_not_printed(address):
    assert repr(address.key) not in repr(address)
    assert "key" not in repr(address)


async def test_no_link_to_where_nobody_listens_is_told_soon(address, certificates):
    began_s = time.monotonic()
    with pytest.raises(LinkError, match=r"refused|Connect"):
        await Link.open(replace(address, port=1), certificates)
    assert time.monotonic() - began_s < handshake.HANDSHAKE_TIMEOUT_S


# Ray runs its actors on uvloop where there is one, whose transports are others


def test_links_work_on_uvloop(caplog):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_it(caplog))


async def all_of_it(caplog):
    """Requests, large replies, a stranger, and the end."""
    engine = EngineLoop(FakeTargetEngine(EPOCH))
    engine.start()
    listener, address = listen(engine.post, VerifyRequest, EPOCH)
    link = await Link.open(address)
    try:
        await test_replies_come_in_the_order_of_the_requests(link)
        await test_replies_larger_than_the_sockets_buffers_arrive_whole(link)
        await test_a_stranger_is_shut_out_with_one_line_and_harms_nobody("another key", address, None, link, caplog)
        await test_a_connection_that_breaks_is_a_lost_engine_to_who_waits(link)
    finally:  # a loop of uvloop does not close beside an open socket: a failure would hang, which no timeout ends
        link.close("the test is over")
        listener.close()
        await engine.close()


async def test_who_waits_to_write_is_told_when_the_link_closes():
    """A full link is not read by its engine any more, which may well be because that has died."""
    link = Link(LinkAddress("127.0.0.1", 1, 5, b"key"))
    link.pause_writing()
    waiting = asyncio.ensure_future(link.exchange([request()], print))
    await asyncio.sleep(0)
    link.close("the engine is gone")
    with pytest.raises(WorkerLost, match="the engine is gone"):
        await asyncio.wait_for(waiting, 5)
