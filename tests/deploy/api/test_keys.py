"""Keys of callers: their digests are kept, they are exchanged under way, and each bounds its caller's priority."""

from __future__ import annotations

import hmac
import os

import grpc
import pytest

from core.errors import ConfigError, Unauthenticated
from deploy.api.authentication import Authenticator, new_key
from deploy.cli.main import EXIT_NO_START, main
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.deploy.grpc.rpc import Script, greeting, server

ZEROS = "0" * 64


def bearer(key):
    return [("authorization", f"Bearer {key}")]


def write(path, *lines):
    """As somebody would who replaces the file after a while: clocks of file systems are coarse."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text("\n".join(lines))
    os.utime(path, ns=(max(before, path.stat().st_mtime_ns) + 10**9,) * 2)


def test_a_new_key_is_printed_once_and_its_line_lets_it_in(tmp_path, capsys):
    assert main(["keys", "new", "billing", "--max-priority", "-5"]) == 0
    said = capsys.readouterr()
    key, line = said.out.strip(), said.err.splitlines()[-1]
    write(tmp_path / "keys", line)
    assert key not in line
    caller = Authenticator(tmp_path / "keys").check(bearer(key))
    assert (caller, caller.max_priority) == ("billing", -5)


@pytest.mark.parametrize("words", [["a b"], ["a:b"], [""], ["x" * 65], ["ok", "--max-priority", "2147483648"]])
def test_what_no_line_can_say_is_refused(words, capsys):
    assert main(["keys", "new", *words]) == EXIT_NO_START
    assert "must be" in capsys.readouterr().err


def test_what_is_kept_does_not_open_the_door(tmp_path):
    """Whoever reads the file has no key: not its line, nor the digest in it."""
    _, line = new_key("a")
    write(tmp_path / "keys", line)
    for sent in (line, line.split(":")[1], "a"):
        with pytest.raises(Unauthenticated):
            Authenticator(tmp_path / "keys").check(bearer(sent))


def test_all_keys_are_compared_in_constant_time(tmp_path, monkeypatch):
    keys, lines = zip(*(new_key(name) for name in "abc"), strict=True)
    write(tmp_path / "keys", *lines)
    authenticator, compared = Authenticator(tmp_path / "keys"), []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *each: compared.append(each) or compare(*each))
    assert authenticator.check(bearer(keys[0])) == "a"
    assert len(compared) == 3


def test_a_caller_has_two_keys_while_it_changes_from_one_to_the_other(tmp_path):
    path, (old, old_line), (new, new_line) = tmp_path / "keys", new_key("a"), new_key("a")
    write(path, old_line)
    authenticator = Authenticator(path)
    assert authenticator.check(bearer(old)) == "a"
    write(path, old_line, new_line)
    assert {authenticator.check(bearer(key)) for key in (old, new)} == {"a"}
    write(path, new_line)
    assert authenticator.check(bearer(new)) == "a"
    with pytest.raises(Unauthenticated):
        authenticator.check(bearer(old))


@pytest.mark.parametrize(
    "wrong",
    [
        "a:",
        "a:12",
        "a:" + "g" * 64,
        ":" + ZEROS,
        f"a:{ZEROS}:",
        f"a b:{ZEROS}",
        "a:b:c:d",
        *(f"a:{ZEROS}:{limit}" for limit in ("max_priority=x", f"max_priority={2**31}", "min=1")),
    ],
)
def test_a_broken_file_keeps_the_old_keys_and_says_where_in_one_line(tmp_path, caplog, wrong):
    path, (old, old_line), (new, new_line) = tmp_path / "keys", new_key("a"), new_key("b")
    write(path, old_line)
    authenticator = Authenticator(path)
    write(path, new_line, "", wrong)
    for _ in range(3):
        assert authenticator.check(bearer(old)) == "a"
        with pytest.raises(Unauthenticated):
            authenticator.check(bearer(new))
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"{path}, line 3 must be" in told
    assert wrong not in told, "it may be a key"
    with pytest.raises(ConfigError, match="line 3"):
        Authenticator(path)


def test_a_key_that_is_taken_away_cuts_no_stream(tmp_path):
    path, (old, old_line), (_, new_line) = tmp_path / "keys", new_key("a"), new_key("a")
    write(path, old_line)
    script = Script(*greeting(), is_endless=True)
    with server(script, Authenticator(path)) as address, grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.GenerateStream(pb.GenerateRequest(text="say"), metadata=bearer(old))
        first = next(stream)
        write(path, new_line)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListModels(pb.ListModelsRequest(), metadata=bearer(old))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (first.text, next(stream).text) == ("hello", " word")
        stream.cancel()


def test_a_callers_priority_is_bounded_by_its_key_else_by_the_service(tmp_path):
    (usual, usual_line), (urgent, urgent_line) = new_key("a"), new_key("b", -5)
    late, late_line = new_key("c", 3)
    write(tmp_path / "keys", usual_line, urgent_line, late_line)
    refused = {
        (usual, -11): "priority: must be at least -10, the most urgent by the setting limits.max_priority, got -11",
        (urgent, -6): "priority: must be at least -5, the most urgent by max_priority of this caller's key, got -6",
        (late, 2): "priority: must be at least 3, the most urgent by max_priority of this caller's key, got 2",
    }
    script = Script(*greeting())
    with server(script, Authenticator(tmp_path / "keys")) as address, grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for (key, priority), details in refused.items():
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(pb.GenerateRequest(text="say", priority=priority), metadata=bearer(key))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details in caught.value.details()
        assert script.requests == []
        for key, priority in ((usual, -10), (urgent, -5), (late, 3), (usual, 2**31 - 1)):
            stub.Generate(pb.GenerateRequest(text="say", priority=priority), metadata=bearer(key))
    assert [each.caller for each in script.requests] == ["a", "b", "c", "a"]
