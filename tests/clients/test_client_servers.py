"""Where calls go: all calls of a client share one place in the list of its servers."""

from __future__ import annotations

import pytest

from outrider_client._servers import Servers
from outrider_client.errors import OutriderError
from outrider_client.options import Connection


class FakeChannel:
    """Makes no calls."""

    def __init__(self, address: str) -> None:
        self.address = address

    def unary_unary(self, *_args: object, **_options: object) -> FakeChannel:
        return self

    unary_stream = unary_unary


@pytest.fixture
def opened():
    return []


@pytest.fixture
def servers(opened):
    def open_channel(address, options, credentials):
        opened.append(address)
        return FakeChannel(address)

    return Servers(("a", "b", "c"), open_channel, Connection(), tls=None, token=None)


def test_two_streams_that_fail_together_go_on_at_the_same_server(servers):
    """Each says that it leaves the first: past the second, which may be well, neither of them must go."""
    addresses = [servers.current()[0] for _ in range(2)]
    assert addresses == ["a", "a"]
    for address in addresses:
        servers.leave(address)
    assert servers.current()[0] == "b"
    servers.leave("a")
    assert servers.current()[0] == "b", "nor has a call that is late any say"


def test_after_the_last_server_the_first_is_tried_again(servers):
    for address in ("a", "b", "c"):
        assert servers.current()[0] == address
        servers.leave(address)
    assert servers.current()[0] == "a"


def test_a_server_has_one_channel_for_all_calls_and_none_before_the_first(servers, opened):
    assert opened == []
    stubs = [servers.current()[1] for _ in range(3)]
    servers.leave("a")
    servers.current()
    assert opened == ["a", "b"]
    assert stubs[0] is stubs[1] is stubs[2]
    assert [channel.address for channel in servers.close()] == ["a", "b"]
    with pytest.raises(OutriderError, match="closed"):
        servers.current()


def test_one_address_is_tried_again_and_again(opened):
    lone = Servers("only", lambda address, *_: FakeChannel(address), Connection(), tls=None, token=None)
    lone.leave("only")
    assert lone.current()[0] == "only"
