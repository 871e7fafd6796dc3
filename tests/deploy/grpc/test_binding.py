"""Where Serve's gRPC server listens, in a process whose proxy has been prepared."""

from __future__ import annotations

import pytest
from ray.serve._private import default_impl

from deploy.grpc.binding import listen_at
from deploy.launch.cluster import Endpoints


@pytest.fixture
def added(monkeypatch) -> list[str]:
    """The addresses that servers are given."""
    addresses: list[str] = []
    monkeypatch.setattr(default_impl, "add_grpc_address", lambda _, address: addresses.append(address))
    return addresses


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:9000"), ("::1", "[::1]:9000"), ("0.0.0.0", "[::]:9000"), ("::", "[::]:9000")],
)
def test_it_listens_at_the_address_that_is_given(added, host, address):
    """Serve's own is both families' unspecified address."""
    listen_at(host)
    default_impl.add_grpc_address(None, "[::]:9000")
    assert added == [address]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "localhost:9000"),
        ("0.0.0.0", "localhost:9000"),
        ("::", "localhost:9000"),
        ("192.0.2.7", "192.0.2.7:9000"),
        ("2001:db8::7", "[2001:db8::7]:9000"),
    ],
)
def test_clients_of_this_machine_are_told_an_address_that_answers(host, address):
    assert Endpoints(host, 9000, 8000).grpc == address
