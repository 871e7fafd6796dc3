"""Every RPC asks for the token, over real gRPC sockets, and health does not."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import ConfigError, Unauthenticated
from deploy.api.authentication import TOKENS_FILE, Authenticator, tokens_path
from deploy.cli import main
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.deploy.grpc.rpc import CALLS, Script, greeting, server


@pytest.fixture
def tokens(tmp_path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("first\nsecond\n")
    return path


def write_later(path: Path, text: str) -> None:
    """Write a file with a later time stamp, because clocks of file systems are coarse."""
    path.write_text(text)
    os.utime(path, ns=(path.stat().st_mtime_ns + 10**9,) * 2)


def bearer(token: str, scheme: str = "Bearer") -> list[tuple[str, str]]:
    return [("user-agent", "test"), ("authorization", f"{scheme} {token}")]


# The RPCs


def test_every_rpc_is_in_the_list():
    methods = pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name
    assert set(CALLS) == set(methods)


@pytest.mark.parametrize(("method", "message"), CALLS.items())
def test_an_rpc_is_answered_to_who_sends_a_token_and_to_nobody_else(tokens, method, message):
    script = Script(*greeting())
    with server(script, Authenticator(tokens)) as address, grpc.insecure_channel(address) as channel:
        call = getattr(generation_pb2_grpc.GenerationServiceStub(channel), method)
        for metadata in (None, bearer("third"), bearer("first", "Basic"), bearer("")):
            with pytest.raises(grpc.RpcError) as caught:
                answered(call(message, metadata=metadata))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "authorization: Bearer TOKEN" in caught.value.details()
        assert script.requests == []
        for metadata in (bearer("first"), bearer("second", "bearer"), [*bearer("x", "Basic"), *bearer("first")]):
            assert answered(call(message, metadata=metadata))


def answered(reply: object) -> object:
    """The result of a unary call, or of a stream once it is read."""
    return list(reply) if isinstance(reply, grpc.Call) and hasattr(reply, "__next__") else reply


def test_an_unknown_model_is_not_told_from_a_known_one_without_a_token(tokens):
    with server(Script(), Authenticator(tokens)) as address, grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            generation_pb2_grpc.GenerationServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(model="x"))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_health_is_told_to_probes_which_have_no_token(tokens):
    with server(Script(), Authenticator(tokens)) as address, grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_the_command_line_takes_its_token_from_the_environment(tokens, monkeypatch, capsys):
    with server(Script(*greeting()), Authenticator(tokens)) as address:
        assert main.main(["generate", "say", "--address", address]) == 1
        assert "a valid token is needed" in capsys.readouterr().err
        monkeypatch.setenv("OUTRIDER_TOKEN", "second")
        assert main.main(["generate", "say", "--address", address]) == 0
        assert capsys.readouterr().out == "hello word\n"


# The file


def test_without_a_file_everybody_is_let_in():
    Authenticator(None).check([])


@pytest.mark.parametrize("text", ["first\n\n \t\nsecond\n\n", "\r\n first \r\nsecond\t"])
def test_space_around_tokens_and_empty_lines_are_no_part_of_them(tokens, text):
    """Else an empty line would let in who sends `authorization: Bearer` and nothing more."""
    tokens.write_text(text)
    authenticator = Authenticator(tokens)
    authenticator.check(bearer("first"))
    authenticator.check(bearer(" second "))
    for metadata in (bearer(""), bearer(" "), [("authorization", "Bearer")]):
        with pytest.raises(Unauthenticated):
            authenticator.check(metadata)


def test_any_of_several_tokens_that_are_sent_opens_the_door(tokens):
    """A client sends several if it adds its own to the one that a gateway's policy adds."""
    authenticator = Authenticator(tokens)
    authenticator.check([*bearer("another"), *bearer("second")])
    with pytest.raises(Unauthenticated):
        authenticator.check([*bearer("another"), *bearer("a third")])


def test_a_token_under_another_name_is_none(tokens):
    with pytest.raises(Unauthenticated):
        Authenticator(tokens).check([("x-authorization", "Bearer first")])


def test_metadata_may_be_bytes(tokens):
    authenticator = Authenticator(tokens)
    authenticator.check([("authorization", b"Bearer first")])
    with pytest.raises(Unauthenticated):
        authenticator.check([("authorization", b"Bearer \xff")])


def test_tokens_are_replaced_under_way(tokens):
    authenticator = Authenticator(tokens)
    authenticator.check(bearer("first"))
    write_later(tokens, "third")
    authenticator.check(bearer("third"))
    with pytest.raises(Unauthenticated):
        authenticator.check(bearer("first"))


def test_a_file_that_has_not_changed_is_not_read_again(tokens, monkeypatch):
    authenticator = Authenticator(tokens)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("the file was read"))
    authenticator.check(bearer("first"))


def test_a_mounted_secret_that_is_exchanged_is_read_anew(tmp_path):
    """Kubernetes puts a symbolic link in place of another; the new file may be of the same size and older."""
    for name, token in (("one", "first"), ("two", "other")):
        (tmp_path / name).write_text(token)
        os.utime(tmp_path / name, (0, 0))
    link = tmp_path / "tokens"
    link.symlink_to("one")
    authenticator = Authenticator(link)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(link)
    authenticator.check(bearer("other"))
    with pytest.raises(Unauthenticated):
        authenticator.check(bearer("first"))


@pytest.mark.parametrize("spoil", [lambda path: write_later(path, " \n"), Path.unlink])
def test_a_file_that_is_emptied_or_lost_neither_opens_the_door_nor_locks_it(tokens, spoil, caplog):
    authenticator = Authenticator(tokens)
    spoil(tokens)
    for _ in range(3):
        authenticator.check(bearer("first"))
        with pytest.raises(Unauthenticated):
            authenticator.check([])
    assert caplog.text.count("the keys from before stay valid") == 1
    write_later(tokens, "third")
    authenticator.check(bearer("third"))
    spoil(tokens)
    authenticator.check(bearer("third"))
    assert caplog.text.count("the keys from before stay valid") == 2, "what has happened again is said again"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("\n", "has no token"),
        ("\udc80", "cannot be read"),
        ("first\n\nsecond of two", "line 3 must be one token"),
        ("first\n#second", "line 2 must be one token"),
    ],
)
def test_a_service_that_has_no_tokens_to_ask_for_does_not_start(tmp_path, text, said):
    path = tmp_path / "tokens"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=f"^orchestrator.tokens_file: .*{said}"):
        Authenticator(path)


def test_a_file_that_could_not_be_read_for_a_moment_is_read_after(tokens, monkeypatch):
    authenticator = Authenticator(tokens)
    write_later(tokens, "third")
    with monkeypatch.context() as moment:
        moment.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(PermissionError("denied")))
        authenticator.check(bearer("first"))
    authenticator.check(bearer("third"))
    with pytest.raises(Unauthenticated):
        authenticator.check(bearer("first"))


def test_a_token_that_cannot_be_sent_is_refused_in_a_line(monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_TOKEN", "two\nlines")
    assert main.main(["generate", "say"]) == 1
    assert capsys.readouterr().err == "outrider: OUTRIDER_TOKEN must be of printable ASCII characters\n"


def test_the_settings_go_before_the_environment(monkeypatch):
    assert tokens_path(None) is None
    monkeypatch.setenv(TOKENS_FILE, "/environment")
    assert tokens_path(None) == Path("/environment")
    assert tokens_path("/settings") == Path("/settings")
    monkeypatch.setenv(TOKENS_FILE, "")
    assert tokens_path(None) is None
