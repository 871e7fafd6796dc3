"""TLS on links: over real sockets, with certificates that are right, wrong, missing, or replaced under way."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import uvloop

from core.config import EngineConfig, LinkTls, ServiceConfig, TargetConfig
from core.errors import ConfigError
from core.records import Base, Sampling, SequenceSpec, Stamp, VerifyRequest
from deploy.engines import actors
from deploy.launch import application
from deploy.link import server
from deploy.link.client import Link
from deploy.link.stream import LinkError
from deploy.link.tls import TLS_DIR, Certificates
from deploy.settings import DEMO_SETTINGS, parse_config
from tests.deploy.fake_engines import FakeTargetEngine
from tests.deploy.link.certificates import HOUR, Authority
from tests.deploy.link.listening import listen
from tests.exchange import replies_of
from workers.engine.thread import EngineLoop

pytestmark = pytest.mark.thorough

EPOCH = 5
SPEC = SequenceSpec(prompt_len=2, sampling=Sampling())


def request(last: int) -> VerifyRequest:
    return VerifyRequest(Stamp("a", EPOCH, 1), Base(0, 0), (1, last), spec=SPEC)


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def files(authority, tmp_path):
    """Certificate files of the engine."""
    return authority.issue(tmp_path / "engine")


@pytest.fixture
def certificates(authority, tmp_path):
    """Certificates of an orchestrator; both ends have certificates of their own."""
    return Certificates(authority.issue(tmp_path / "orchestrator"))


@pytest.fixture
async def address(files):
    async with listening(files) as where:
        yield where


def listening(files: LinkTls | None):
    return _Listening(files)


class _Listening:
    """An engine that listens with these files while the block lasts."""

    def __init__(self, files: LinkTls | None) -> None:
        self._engine = EngineLoop(FakeTargetEngine(EPOCH))
        self._certificates = Certificates(files) if files else None

    async def __aenter__(self):
        self._engine.start()
        self._server, address = listen(self._engine.post, VerifyRequest, EPOCH, self._certificates)
        return address

    async def __aexit__(self, *exc):
        self._server.close()
        async with asyncio.timeout(60):  # whoever has left is forgotten
            while self._server.links or self._server.pending:  # noqa: ASYNC110  it happens at the other end
                await asyncio.sleep(0.01)
        await self._engine.close()


@pytest.fixture
async def link(address, certificates):
    link = await Link.open(address, certificates)
    yield link
    assert (await replies_of(link, [request(5)]))[0].next_token == 6, "whatever happened harms no other link"
    link.close("the test is over")


def put(path, content):
    Path(path).write_bytes(content)


async def until_logged(caplog, text):
    async with asyncio.timeout(60):
        while not any(text in message for message in caplog.messages):  # noqa: ASYNC110  the log has no event
            await asyncio.sleep(0.01)


def logged(caplog):
    """The log of the engine's end."""
    return [record.getMessage() for record in caplog.records if record.name == server.__name__]


async def test_what_goes_over_the_link_cannot_be_read(files, certificates):
    async with listening(files) as address:
        seen = bytearray()

        async def tap(reader, writer):
            inner_reader, inner_writer = await asyncio.open_connection(address.host, address.port)
            await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

        async def copy(reader, writer):
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
            writer.close()

        middle = await asyncio.start_server(tap, "127.0.0.1", 0)
        link = await Link.open(replace(address, port=middle.sockets[0].getsockname()[1]), certificates)
        long_name = "a-session-that-would-be-seen"
        asked = replace(request(5), stamp=Stamp(long_name, EPOCH, 1))
        assert (await replies_of(link, [asked]))[0].stamp.lease == long_name
        assert len(seen) > 1000
        assert long_name.encode() not in seen
        link.close("the test is over")
        middle.close()
        await asyncio.sleep(0.05)


# Others at the engine's door


async def other_authority(address, tmp_path):
    await Link.open(address, Certificates(Authority("another").issue(tmp_path / "other")))


def with_a_certificate_of(name: str, lifetime: timedelta = HOUR):
    """It trusts the engine; the engine does not trust it."""

    async def call(address, tmp_path):
        trusted = (tmp_path / "engine" / "ca.crt").read_bytes()
        other = Authority(name).issue(tmp_path / "other", lifetime)
        put(other.ca_file, trusted)
        await Link.open(address, Certificates(other))

    return call


async def no_certificate(address, tmp_path):
    context = ssl.create_default_context(cafile=str(tmp_path / "engine" / "ca.crt"))
    context.check_hostname = False
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        if await reader.read(1) == b"":
            raise LinkError("it was closed")
    except ssl.SSLError as error:
        raise LinkError(str(error)) from error
    finally:
        writer.transport.abort()


async def old_tls(address, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        await asyncio.open_connection(address.host, address.port, ssl=context)
    except OSError as error:
        raise LinkError(str(error)) from error


async def garbage(address, tmp_path):
    await say(address, b"GET / HTTP/1.1\r\nHost: me\r\n\r\n")


async def say(address, what):
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(what)
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)  # an alert, perhaps, and then the end
    writer.transport.abort()
    raise LinkError("it was closed")


OTHERS = {
    "an authority of its own": (other_authority, "perhaps because it does not trust|unknown ca"),
    "a certificate of another authority": (with_a_certificate_of("another"), "certificate verify failed"),
    "another authority of the same name": (with_a_certificate_of("authority"), "certificate verify failed"),
    "no certificate": (no_certificate, "peer did not return a certificate"),
    "an old TLS": (old_tls, "unsupported protocol"),
    "no TLS at all": (garbage, "http request|wrong version number"),
}


@pytest.mark.parametrize("who", OTHERS)
async def test_who_is_not_trusted_is_shut_out_with_one_line_and_harms_nobody(who, address, link, tmp_path, caplog):
    call, reason = OTHERS[who]
    with pytest.raises(LinkError):
        await call(address, tmp_path)
    await until_logged(caplog, "is closed: TLS failed")
    (line,) = logged(caplog)
    assert line.startswith("the link from 127.0.0.1:")
    assert any(each in line.lower().replace("_", " ") for each in reason.split("|")), line


async def test_a_certificate_that_has_expired_is_not_taken(address, link, authority, tmp_path, caplog):
    expired = Certificates(authority.issue(tmp_path / "expired", lifetime=-HOUR))
    with pytest.raises(LinkError, match="closed the link before it was open; the engine's log says why"):
        await Link.open(address, expired)
    await until_logged(caplog, "certificate has expired")
    assert len(logged(caplog)) == 1


async def test_an_engine_whose_certificate_is_not_trusted_is_not_spoken_to(certificates, tmp_path, caplog):
    async with listening(Authority("another").issue(tmp_path / "engine")) as address:
        with pytest.raises(LinkError, match="certificate verify failed"):
            await Link.open(address, certificates)
        await until_logged(caplog, "is closed: TLS failed")
        assert len(logged(caplog)) == 1


async def test_a_certificate_alone_does_not_let_in(address, link, certificates, caplog):
    with pytest.raises(LinkError, match="closed the link"):
        await Link.open(replace(address, key=b"x" * 32), certificates)
    assert "the orchestrator's key is not this engine's" in logged(caplog)[0]


async def test_who_says_nothing_is_shut_out_after_a_while(files, caplog, monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with listening(files) as address:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        (line,) = logged(caplog)
        assert "TLS failed: SSL handshake is taking longer than 0.1 seconds" in line


async def test_who_waits_within_tls_takes_one_of_the_strangers_places(address, link, monkeypatch):
    monkeypatch.setattr(server, "MAX_PENDING", 2)
    quiet = [await asyncio.open_connection(address.host, address.port) for _ in range(2)]
    reader, writer = await asyncio.open_connection(address.host, address.port)
    assert await asyncio.wait_for(reader.read(), 4) == b"", "at once"
    for _, waiting in [*quiet, (None, writer)]:
        waiting.close()


async def test_what_is_sent_before_the_challenge_lets_nobody_in(address, link, certificates, caplog):
    """It may arrive together with the end of TLS's handshake, before there is an outbox."""
    loop = asyncio.get_running_loop()
    connection = socket.create_connection((address.host, address.port))
    await loop.run_in_executor(None, lambda: early(connection, certificates.for_orchestrator()))
    await until_logged(caplog, "is closed: a frame that is not a Hello")
    assert len(logged(caplog)) == 1
    connection.close()


def early(connection, context):
    """TLS by hand, so that the handshake's last message and the first frame are one write."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            connection.sendall(outgoing.read())
            incoming.write(connection.recv(65536))
    tls.write((40).to_bytes(4, "big") + b"\xff" * 40)
    connection.sendall(outgoing.read())
    connection.recv(65536)


# One end with TLS, the other without


async def test_an_orchestrator_without_tls_says_so_at_once(address):
    with pytest.raises(LinkError, match=r"requires TLS, but here neither engine\.link_tls nor OUTRIDER_LINK_TLS_DIR"):
        await Link.open(address)


async def test_an_orchestrator_with_tls_does_without_none(certificates):
    async with listening(None) as address:
        with pytest.raises(LinkError, match="the engine has no TLS"):
            await Link.open(address, certificates)


async def test_an_engine_that_lies_about_tls_gets_none_of_it(certificates, caplog):
    async with listening(None) as address:
        with pytest.raises(LinkError, match=r"(?i)wrong.version.number"):
            await Link.open(replace(address, has_tls=True), certificates)
        await until_logged(caplog, "at most 256")
        assert len(logged(caplog)) == 1


async def test_an_orchestrator_without_tls_does_not_get_in_by_itself(address, link, monkeypatch):
    monkeypatch.setattr("deploy.link.client.HANDSHAKE_TIMEOUT_S", 0.1)
    with pytest.raises(LinkError, match=r"no answer within 0\.1 s"):
        await Link.open(replace(address, has_tls=False))


# Files


async def test_certificates_are_replaced_under_way(files, link, address, certificates, authority, tmp_path):
    """The order of docs/runbook.md: trust both authorities, show the new one's certificates, forget the old one."""
    new, other = Authority("new"), certificates._contexts._paths[0].parent
    both = authority.certificate + new.certificate
    for end in (Path(files.ca_file), other / "ca.crt"):
        put(end, both)
    await still_opens(address, certificates)
    for directory in (Path(files.ca_file).parent, other):
        new.issue(directory)
        put(directory / "ca.crt", both)
        await still_opens(address, certificates)
    for end in (Path(files.ca_file), other / "ca.crt"):
        put(end, new.certificate)
        await still_opens(address, certificates)
    with pytest.raises(LinkError):
        await Link.open(address, Certificates(authority.issue(tmp_path / "old")))


async def still_opens(address, certificates):
    link = await Link.open(address, certificates)
    assert (await replies_of(link, [request(7)]))[0].next_token == 8
    link.close("it is not needed")


async def test_what_is_half_replaced_is_not_used_and_told_once(
    files, address, certificates, authority, tmp_path, caplog
):
    new = authority.issue(tmp_path / "new")
    put(files.key_file, b"half a k")
    for _ in range(3):
        await still_opens(address, certificates)
    (complaint,) = [message for message in caplog.messages if "certificates that were read before" in message]
    assert "engine.link_tls.key_file" in complaint
    shutil.copy(new.key_file, files.key_file)
    shutil.copy(new.certificate_file, files.certificate_file)
    await still_opens(address, certificates)


def spoil(setting: str, content: bytes | None):
    def change(files: LinkTls) -> None:
        path = Path(getattr(files, setting))
        path.unlink() if content is None else path.write_bytes(content)

    return change


WRONG = {
    **{
        f"no {setting}": (spoil(setting, None), f"{setting} .*cannot be read: No such file")
        for setting in ("certificate_file", "key_file", "ca_file")
    },
    **{
        f"nonsense in {setting}": (spoil(setting, b"nonsense"), f"{setting} .*: .* has no")
        for setting in ("certificate_file", "key_file", "ca_file")
    },
    "an empty ca_file": (spoil("ca_file", b""), "ca_file .*: .* has no certificate"),
    "another certificate's key": (
        lambda files: Path(Authority().issue(Path(files.key_file).parent / "other").key_file).replace(files.key_file),
        "key_file .*: .* has no key of .*tls.crt: KEY_VALUES_MISMATCH",
    ),
    "a key with a passphrase": (
        lambda files: Authority().issue(Path(files.key_file).parent, passphrase="secret"),
        "key_file .*must have no passphrase",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_files_are_named_with_their_setting(what, files):
    change, said = WRONG[what]
    change(files)
    with pytest.raises(ConfigError, match=rf"^engine\.link_tls\.{said}"):
        Certificates(files)


def test_a_directory_is_no_file(files, tmp_path):
    with pytest.raises(ConfigError, match=r"^engine\.link_tls\.ca_file .*: Is a directory"):
        Certificates(replace(files, ca_file=str(tmp_path)))


def test_the_environment_may_name_a_directory_and_settings_go_before(files, tmp_path, monkeypatch):
    assert Certificates.of(None) is None
    monkeypatch.setenv(TLS_DIR, str(Path(files.ca_file).parent))
    assert Certificates.of(None) is not None
    monkeypatch.setenv(TLS_DIR, str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"nothing/tls\.crt cannot be read"):
        Certificates.of(None)
    assert Certificates.of(files) is not None


def test_no_file_is_named_by_nothing():
    with pytest.raises(ConfigError, match="key_file must be the path of a file, got ''"):
        LinkTls("a", "", "c")


def test_relative_paths_start_at_the_file_of_settings(tmp_path):
    names = {"certificate_file": "tls/a", "key_file": "b", "ca_file": "/c"}
    engine = {**DEMO_SETTINGS["target"]["engine"], "link_tls": names}
    config = parse_config({"target": {"engine": engine}}, tmp_path)
    assert config.target.engine.link_tls == LinkTls(f"{tmp_path}/tls/a", f"{tmp_path}/b", "/c")


def test_the_command_says_what_is_wrong_before_it_starts_anything(files):
    Path(files.ca_file).unlink()
    engine = EngineConfig(DEMO_SETTINGS["target"]["engine"]["model"], link_tls=files)
    with pytest.raises(ConfigError, match=r"engine\.link_tls\.ca_file"):
        application.check_pair(ServiceConfig(TargetConfig(engine)))


async def test_an_engine_says_what_is_wrong_before_it_loads(files, monkeypatch):
    put(files.ca_file, b"")
    monkeypatch.setattr(actors, "log_to_stderr", lambda: None)
    engine = actors.TargetActor(EngineConfig("nowhere", link_tls=files), EPOCH)
    monkeypatch.setattr(engine, "_load_warm", lambda *_: pytest.fail("it loads"))
    with pytest.raises(ConfigError, match=r"engine\.link_tls\.ca_file"):
        await engine.load()


def test_links_with_tls_work_on_uvloop(authority, tmp_path, caplog):
    """Ray runs its actors on uvloop where there is one, whose TLS is another."""

    async def all_of_it() -> None:
        async with listening(authority.issue(tmp_path / "engine")) as address:
            mine = Certificates(authority.issue(tmp_path / "orchestrator"))
            await still_opens(address, mine)
            long = [replace(request(5), stamp=Stamp("s" * 300_000, EPOCH, number)) for number in range(20)]
            link = await Link.open(address, mine)
            assert [reply.next_token for reply in await replies_of(link, long)] == [6] * 20
            for call, _ in OTHERS.values():
                with pytest.raises(LinkError):
                    await call(address, tmp_path)
            async with asyncio.timeout(60):
                while len(logged(caplog)) < len(OTHERS):  # noqa: ASYNC110  the log has no event
                    await asyncio.sleep(0.01)
            assert (await replies_of(link, [request(5)]))[0].next_token == 6
            link.close("the test is over")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_it())
    assert all("TLS failed" in line for line in logged(caplog))
