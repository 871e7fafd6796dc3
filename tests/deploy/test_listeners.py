"""`outrider serve` listens on its own ports if told to, on that of metrics, and on no other without a token."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness.nodes import free_port
from core.config import LINK_PORTS
from deploy.grpc.servicer import MAX_WATCHES
from deploy.link.address import LinkAddress
from deploy.link.handshake import answer
from deploy.link.stream import HEADER_BYTES, framed
from outrider_client import Client, Unauthenticated
from protos.outrider.link.v1 import link_pb2 as pb_link
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.deploy.cli.serve_command import command_serving
from tests.deploy.listeners import Listener, listeners

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROBES = (
    "/ray.rpc.CoreWorkerService/KillActor",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.ReporterService/ReportOCMetrics",
    "/ray.rpc.LogService/ListLogs",
    "/ray.serve.ASGIService/HandleRequest",
)
"""A method of each kind of server that Ray and Serve start: others do not know it, that one asks for a token."""
AGENT_PATHS = ("/api/job_agent/jobs/", "/get_or_create_runtime_env")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[int, int]]:
    """The process of `outrider serve`, and its gRPC port."""
    here = tmp_path_factory.mktemp("serve")
    (here / "tokens").write_text("let-me-in\n")
    with command_serving(here / "stderr", "--set", f"orchestrator.tokens_file={here / 'tokens'}") as serving:
        yield serving.process.pid, serving.port


def test_whatever_others_reach_is_the_service_or_metrics_or_asks_for_a_token(server):
    pid, grpc_port = server
    found = [listener for listener in listeners(pid) if not listener.is_local]
    kinds = {listener: kind(listener, grpc_port) for listener in found}
    open_doors = [listener for listener, each in kinds.items() if each == "open"]
    assert open_doors == []
    assert "service" not in kinds.values(), "nobody has asked for other addresses than this machine's own"
    assert sum(each == "asks for a key" for each in kinds.values()) == 2, "the target and the draft"
    assert sum(each == "asks for a token" for each in kinds.values()) >= 8  # GCS, raylet, agents, replicas, engines


def test_who_asks_for_it_is_reached_from_outside_at_the_ports_of_the_image(tmp_path):
    """The image's command has fixed ports, which are free in a container and may not be here."""
    metrics_port, http_port = free_port(), free_port()
    flags = ("--host", "0.0.0.0", "--metrics-port", str(metrics_port), "--http-port", str(http_port))
    with command_serving(tmp_path / "stderr", *flags) as serving:
        outside = {listener.port: listener for listener in listeners(serving.process.pid) if not listener.is_local}
        assert status(outside[http_port], "/health", None) == 200
        assert has_only_metrics(outside[metrics_port])
        with Client(f"localhost:{outside[serving.port].port}") as client:
            assert client.is_serving()
        assert "all interfaces" in serving.log.read_text()


def kind(listener: Listener, grpc_port: int) -> str:
    if listener.port == grpc_port:
        return "service"
    if asks_by_link(listener):
        return "asks for a key"
    if asks_by_grpc(listener) or asks_by_http(listener):
        return "asks for a token"
    return "metrics" if has_only_metrics(listener) else "open"


def asks_by_link(listener: Listener) -> bool:
    """It challenges whoever comes, and closes when the proof is wrong."""
    if listener.port not in range(LINK_PORTS[0], LINK_PORTS[1] + 1):
        return False
    host, _, port = listener.reach.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        challenged = pb_link.Challenge.FromString(read_frame(connection))
        address = LinkAddress(host, int(port), epoch=1, key=b"a guess".ljust(32))
        connection.sendall(framed(answer(challenged, address).SerializeToString()))
        return connection.recv(1) == b""


def read_frame(connection: socket.socket) -> bytes:
    num_bytes = int.from_bytes(connection.recv(HEADER_BYTES, socket.MSG_WAITALL), "big")
    return connection.recv(num_bytes, socket.MSG_WAITALL)


def asks_by_grpc(listener: Listener) -> bool:
    with grpc.insecure_channel(listener.reach) as channel:
        return grpc.StatusCode.UNAUTHENTICATED in {code(channel, method) for method in PROBES}


def code(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """The status of an empty call without a token; an answer would mean an open door."""
    try:
        channel.unary_unary(method)(b"", timeout=60)
    except grpc.RpcError as error:
        return error.code()
    pytest.fail(f"{method} was answered")


def asks_by_http(listener: Listener) -> bool:
    return any(status(listener, path, b"{}") in (401, 403) for path in AGENT_PATHS)


def has_only_metrics(listener: Listener) -> bool:
    """It lets itself be read by Prometheus, and has nothing at the paths that do something."""
    return status(listener, "/metrics") == 200 and all(
        status(listener, path, b"{}") in (200, 404, 405, 501) for path in AGENT_PATHS
    )


def status(listener: Listener, path: str, body: bytes | None = None) -> int:
    try:
        with urlopen(Request(f"http://{listener.reach}{path}", data=body), timeout=60) as reply:
            return int(reply.status)
    except HTTPError as error:
        return error.code
    except (URLError, OSError):
        return 0


def test_the_service_asks_for_a_token_where_it_is_told_to(server):
    _, port = server
    message = pb.GenerateRequest(text="a", stopping=pb.StoppingParams(max_tokens=3, ignore_eos=True))
    with Client(f"localhost:{port}") as stranger, connected(port) as stub:
        assert stranger.is_serving()
        for call in (lambda: stranger.generate("a"), stranger.model_info):
            with pytest.raises(Unauthenticated, match="UNAUTHENTICATED: a valid token is needed"):
                call()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(message)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        whole = stub.Generate(message, metadata=(("authorization", "Bearer let-me-in"),))
    with Client(f"localhost:{port}", token="let-me-in") as caller:
        assert caller.generate("a", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
    assert whole.usage.completion_tokens == 3


@contextmanager
def connected(port):
    with grpc.insecure_channel(f"localhost:{port}") as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def test_strangers_who_watch_health_take_no_places_but_those_set_aside_and_give_them_back(server):
    _, port = server
    with grpc.insecure_channel(f"localhost:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for _ in range(3):
            watches = watch_all(health)
            with pytest.raises(grpc.RpcError) as caught:
                next(health.Watch(health_pb2.HealthCheckRequest()))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for watch in watches:
                watch.cancel()


def watch_all(health, timeout_s: float = 20.0):
    """Begin the largest number of watches, once earlier ones have given their places back."""
    watches = []
    end_s = time.monotonic() + timeout_s
    while len(watches) < MAX_WATCHES:
        watch = health.Watch(health_pb2.HealthCheckRequest())
        try:
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watches.append(watch)
        except grpc.RpcError:
            assert time.monotonic() < end_s, "places are not given back"
            time.sleep(0.1)
    return watches
