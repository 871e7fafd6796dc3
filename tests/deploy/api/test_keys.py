"""Keys of callers: their digests are kept, they are exchanged under way, and each bounds its caller's priority."""

from __future__ import annotations

import hmac
import os

import grpc
import pytest

from core.errors import ConfigError, Unauthenticated
from core.records import Quota, Verification
from deploy.api.authentication import Authenticator, Caller, KeyLimits, new_key
from deploy.api.given import Given
from deploy.api.request import to_generation_request
from deploy.cli.main import EXIT_NO_START, main
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.deploy.api.test_samples_and_quotas import Admitting
from tests.deploy.grpc.rpc import Script, greeting, served, server

ZEROS = "0" * 64


def bearer(key):
    return [("authorization", f"Bearer {key}")]


def write(path, *lines):
    """Write the file with a later time stamp, because clocks of file systems are coarse."""
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
    assert (caller, caller.limits) == ("billing", KeyLimits(max_priority=-5))


def test_a_key_has_its_caller_s_own_quota(tmp_path, capsys):
    given = ["--max-tokens-per-minute", "9000", "--max-requests-per-minute", "0", "--max-sessions", "7"]
    assert main(["keys", "new", "billing", *given]) == 0
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.endswith(":max_requests_per_minute=0:max_tokens_per_minute=9000:max_sessions=7")
    name, digest, *fields = line.split(":")
    for order in (fields, fields[::-1], [*fields, "max_priority=3"]):
        write(tmp_path / "keys", ":".join([name, digest, *order]))
        limits = Authenticator(tmp_path / "keys").check(bearer(said.out.strip())).limits
        assert limits.quota == Quota(max_requests_per_minute=0, max_tokens_per_minute=9000, max_sessions=7)
        assert limits.max_priority == (3 if len(order) == 4 else None)


def test_callers_are_isolated_from_each_other_unless_they_are_of_one_tenant(tmp_path, capsys):
    keys, lines = [], []
    for words in (["a"], ["b"], ["c", "--tenant", "a"], ["d", "--max-priority", "3", "--tenant", "a"]):
        assert main(["keys", "new", *words]) == 0
        said = capsys.readouterr()
        keys.append(said.out.strip())
        lines.append(said.err.splitlines()[-1])
    write(tmp_path / "keys", *lines, "plain")
    authenticator = Authenticator(tmp_path / "keys")
    callers = [authenticator.check(bearer(key)) for key in (*keys, "plain")]
    assert [caller.isolation for caller in callers[:4]] == ["caller:a", "caller:b", "tenant:a", "tenant:a"]
    assert callers[4].isolation == f"caller:{callers[4]}"
    assert (callers[3], callers[3].limits) == ("d", KeyLimits(max_priority=3))
    assert Authenticator(None).check(()).isolation == "", "who sends no key shares nothing"


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_key_may_rule_out_learning(tmp_path, capsys, asked):
    """Whatever its requests say."""
    assert main(["keys", "new", "a", "--tenant", "t", "--no-learning"]) == 0
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.endswith(":tenant=t:learning=no")
    write(tmp_path / "keys", line)
    caller = Authenticator(tmp_path / "keys").check(bearer(said.out.strip()))
    for name, learning in ((caller, False), (Caller("b"), asked), ("", asked)):
        given = Given(token_ids=[5, 6], learning=asked, caller=name)
        assert to_generation_request(given, served(), 0.0).learning is learning
    write(tmp_path / "wrong", line.replace("learning=no", "learning=never"))
    with pytest.raises(ConfigError, match="must have learning no, or leave it out"):
        Authenticator(tmp_path / "wrong")


@pytest.mark.parametrize(
    ("verification", "sampling", "isolation"),
    [
        (Verification.REJECTION, {"seed": 3}, ""),
        (Verification.RECURSIVE_REJECTION, {"seed": 0}, ""),
        (Verification.REJECTION, {}, "caller:a"),
        (Verification.REJECTION, {"seed": 3, "temperature": 0.0}, "caller:a"),
        (Verification.COUPLED, {"seed": 3}, "caller:a"),
    ],
)
def test_no_output_by_q_is_guessed_by_another_with_its_seed(verification, sampling, isolation):
    """The same noise would draw the one and judge it as a guess of the other."""
    given = Given(token_ids=[5, 6], sampling=sampling, verification=verification, caller=Caller("a"))
    assert to_generation_request(given, served(), 0.0).isolation == isolation


@pytest.mark.parametrize(
    "words",
    [
        ["ok", "--tenant", "a:b"],
        ["ok", "--tenant", "x" * 65],
        ["a b"],
        ["a:b"],
        [""],
        ["x" * 65],
        ["ok", "--max-priority", "2147483648"],
        ["ok", "--max-tokens-per-minute", "-1"],
    ],
)
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
    assert f"{path}, line 3 must" in told
    assert wrong not in told, "it may be a key"
    with pytest.raises(ConfigError, match="line 3"):
        Authenticator(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("max_tokens_per_minute=-1", r"must have max_tokens_per_minute in \[0, 2147483647\]"),
        ("max_requests_per_minute=1e3", r"must have max_requests_per_minute in \[0"),
        ("max_priority=", "must have max_priority in"),
        ("max_priority=1:max_priority=1", "must have max_priority once"),
        ("max_priority=1:tokens=5", "field 2 is none of these"),
        ("max_priority=1:", "field 2 is none of these"),
        ("tenant=", "must have tenant 1 to 64 letters"),
        ("tenant=a b", "must be one token"),
        ("tenant=a/b", "must have tenant 1 to 64 letters"),
        ("tenant=a:max_priority=1:tenant=b", "must have tenant once"),
        ("tenant=a:tokens=5", "field 2 is none of these"),
    ],
)
def test_a_wrong_limit_is_refused_by_file_line_and_field(tmp_path, fields, said):
    write(tmp_path / "keys", new_key("a")[1], f"b:{ZEROS}:{fields}")
    with pytest.raises(ConfigError, match=f"keys, line 2 .*{said}"):
        Authenticator(tmp_path / "keys")


def test_a_quota_of_a_key_s_own_holds_for_it_alone_and_is_changed_under_way(tmp_path):
    """The service allows one request a minute, one key two, then three of which two are used."""
    path, (usual, usual_line), (own, own_line) = tmp_path / "keys", new_key("a"), new_key("b")
    write(path, usual_line, f"{own_line}:max_requests_per_minute=2")
    script = Admitting(max_requests_per_minute=1)
    asked = pb.GenerateRequest(text="say", stopping=pb.StoppingParams(max_tokens=5))
    refusals: list[tuple[grpc.StatusCode, str]] = []
    with server(script, Authenticator(path)) as address, grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        def served(key):
            try:
                return bool(stub.Generate(asked, metadata=bearer(key)).text)
            except grpc.RpcError as error:
                refusals.append((error.code(), error.details()))
                return False

        assert [served(usual) for _ in range(2)] == [True, False]
        assert [served(own) for _ in range(3)] == [True, True, False]
        script.clock.now_s += 60.0
        assert served(own)
        write(path, usual_line, f"{own_line}:max_requests_per_minute=4")  # half of it is left
        assert [served(own) for _ in range(3)] == [True, True, False]
        write(path, usual_line, f"{own_line}:max_requests_per_minute=0")
        assert all(served(own) for _ in range(5))
        write(path, usual_line, f"{own_line}:max_requests_per_minute=x")
        assert all(served(own) for _ in range(5)), "a wrong line changes nothing"
    assert {code for code, _ in refusals} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all("requests a minute is used up" in details for _, details in refusals)


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
    (usual, usual_line), (urgent, urgent_line) = new_key("a"), new_key("b", KeyLimits(-5))
    late, late_line = new_key("c", KeyLimits(3))
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
