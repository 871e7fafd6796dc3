"""An outbox keeps the order of what is sent, whichever thread writes it."""

from __future__ import annotations

import socket

import pytest

from deploy.link.stream import Outbox

LONG = b"x" * 10_000_000


class FakeTransport:
    """The event loop's end of a connection: what it is given is written at once."""

    def __init__(self, connection, sslcontext=None):
        self.extra = {"socket": connection, "sslcontext": sslcontext}
        self.written = []

    def get_extra_info(self, name):
        return self.extra[name]

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return False

    def write(self, data):
        self.written.append(data)


class FakeLoop:
    """Comes to what it is left with when the test says so."""

    def __init__(self):
        self.later = []

    def call_soon_threadsafe(self, function, *arguments):
        self.later.append((function, arguments))

    def run(self):
        for function, arguments in self.later:
            function(*arguments)
        self.later.clear()


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@pytest.fixture
def loop():
    return FakeLoop()


def outbox(transport, loop):
    return Outbox(transport, loop, pytest.fail)


def test_a_short_frame_is_written_by_who_sends_it(pair, loop):
    near, far = pair
    box = outbox(FakeTransport(near), loop)
    box.send(b"abc")
    assert far.recv(10) == b"abc"
    assert loop.later == []
    box.close()


def test_what_is_sent_while_an_earlier_frame_waits_does_not_overtake_it(pair, loop):
    near, far = pair
    transport = FakeTransport(near)
    box = outbox(transport, loop)
    box.send(LONG)
    far.recv(len(LONG), socket.MSG_DONTWAIT)  # there is room again
    box.send(b"abc")
    loop.run()
    assert b"".join(transport.written).endswith(b"xabc")
    box.send(b"def")
    assert loop.later == [], "nothing waits any more: it is written at once"
    box.close()


def test_what_has_to_be_encrypted_is_left_to_the_event_loop(pair, loop):
    near, _ = pair
    transport = FakeTransport(near, sslcontext=object())
    box = outbox(transport, loop)
    box.send(b"abc")
    assert transport.written == []
    loop.run()
    assert transport.written == [b"abc"]
    box.close()


def test_after_its_end_an_outbox_writes_nothing_itself(pair, loop):
    near, far = pair
    box = outbox(FakeTransport(near), loop)
    box.close()
    box.send(b"abc")
    with pytest.raises(BlockingIOError):
        far.recv(10, socket.MSG_DONTWAIT)
