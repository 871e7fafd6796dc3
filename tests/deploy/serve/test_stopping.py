"""How `outrider serve` ends: what streams goes on, what comes is told to go elsewhere, and nobody waits for ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import grpc
import pytest

from core.errors import StartupError, Unavailable
from deploy.cli.serve import EXIT_CUT_OFF
from deploy.launch import application, cluster, local
from outrider_client import Client, OutriderError, Retry, Stream
from tests.deploy.cli.serve_command import Serving, command_serving

NUM_TOKENS = 600


def connected(serving: Serving) -> Client:
    return Client(f"localhost:{serving.port}", retry=Retry(max_retries=0))


def begin(client: Client, max_tokens: int = NUM_TOKENS) -> Stream:
    return client.stream("def f(x):\n", temperature=1.0, seed=3, max_tokens=max_tokens, ignore_eos=True)


# The process


@pytest.fixture
def serving(tmp_path, monkeypatch) -> Iterator[Serving]:
    """In an environment in which a cluster's processes are, such as an image's."""
    for name, value in cluster.NODE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with command_serving(tmp_path / "stderr", "--draft", "none", "--drain-timeout", "120") as serving:
        yield serving


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.ci
def test_a_stream_runs_to_its_end_and_what_comes_is_refused(serving):
    with connected(serving) as client:
        stream = begin(client)
        received = list(next(stream).token_ids)
        serving.process.send_signal(signal.SIGTERM)
        while client.is_serving():
            received += next(stream).token_ids
        with pytest.raises(OutriderError) as caught:
            next(begin(client, 1))
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in caught.value.message
        received += [token for chunk in stream for token in chunk.token_ids]
    assert len(received) == NUM_TOKENS
    assert serving.process.wait(60) == 0
    assert "new requests are refused; 1 stream may continue" in serving.log.read_text()


@pytest.mark.ray
@pytest.mark.slow
def test_a_second_signal_stops_at_once(serving):
    with connected(serving) as client:
        stream = begin(client)
        next(stream)
        serving.process.send_signal(signal.SIGINT)
        while client.is_serving():
            next(stream)
        serving.process.send_signal(signal.SIGINT)
        with pytest.raises(OutriderError) as caught:
            list(stream)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert "shutting down; resume" in caught.value.message
    assert serving.process.wait(60) == EXIT_CUT_OFF
    assert "1 stream will be cut off" in serving.log.read_text()


# How long is waited; the orchestrators are a list of what they answer


@pytest.fixture
def answers(monkeypatch) -> list[int | Unavailable]:
    """The results of `wind_down`, in order; the last again and again."""
    answers: list[int | Unavailable] = []

    def wind_down() -> int:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    monkeypatch.setattr(application, "wind_down", wind_down)
    monkeypatch.setattr(application, "cut_off", lambda: None)
    monkeypatch.setattr(local, "DRAIN_PERIOD_S", 0.01)
    monkeypatch.setattr(local, "FLUSH_S", 0.01)
    return answers


def drained(timeout_s: float = 60.0, stop_now: threading.Event | None = None) -> list[str]:
    """The reports; a wait of a minute fails by the test's own limit."""
    told: list[str] = []
    local.drain(timeout_s, stop_now or threading.Event(), told.append)
    return told


def test_it_waits_until_the_last_stream_has_ended_and_says_each_number_once(answers):
    answers += [2, 2, 1, 0]
    assert [line.split("; ")[1].split(" may")[0] for line in drained()] == ["2 streams", "1 stream"]
    assert answers == [0]


class CutOff:
    """Orchestrators that are told to end what is in progress, and perhaps do not answer."""

    def __init__(self, error: Unavailable | None = None):
        self.num_reported = 0
        self.error = error

    def __call__(self) -> None:
        self.num_reported += 1
        if self.error is not None:
            raise self.error


def test_streams_that_have_ended_by_themselves_are_no_failure_and_nobody_is_cut_off(answers, monkeypatch):
    monkeypatch.setattr(application, "cut_off", cut_off := CutOff())
    answers += [1, 0]
    assert local.drain(60.0, threading.Event(), lambda _: None)
    assert cut_off.num_reported == 0


@pytest.mark.parametrize("answer", [3, Unavailable("not all orchestrators answer: x")])
def test_streams_that_are_cut_off_are_told_so_and_it_is_a_failure(answers, monkeypatch, answer):
    monkeypatch.setattr(application, "cut_off", cut_off := CutOff())
    answers.append(answer)
    assert not local.drain(0.05, threading.Event(), lambda _: None)
    assert cut_off.num_reported == 1


def test_callers_that_may_not_be_told_are_mentioned_and_nobody_waits_for_them(answers, monkeypatch):
    monkeypatch.setattr(application, "cut_off", CutOff(Unavailable("not all orchestrators answer: x")))
    answers.append(1)
    assert (
        drained(timeout_s=0.05)[-1] == "some streams may end without an error message: not all orchestrators answer: x"
    )


def test_an_idle_server_says_nothing(answers):
    answers.append(0)
    assert drained() == []


def test_what_has_not_ended_in_time_is_cut_off(answers):
    answers.append(3)
    assert drained(timeout_s=0.05)[-1] == "3 streams will be cut off"


def test_somebody_in_a_hurry_does_not_wait(answers):
    answers.append(1)
    stop_now = threading.Event()
    stop_now.set()
    assert drained(timeout_s=600.0, stop_now=stop_now)[-1] == "1 stream will be cut off"  # a test may take 300 s


def test_orchestrators_that_do_not_answer_are_asked_again(answers):
    silent = Unavailable("not all orchestrators answer: x")
    answers += [2, silent, silent, 1, 0]
    assert [line.split("; ")[-1].split(" may")[0] for line in drained()] == ["2 streams", str(silent), "1 stream"]
    assert answers == [0]


def test_orchestrators_that_never_answer_are_waited_for_no_longer_than_streams(answers):
    answers.append(Unavailable("not all orchestrators answer: x"))
    assert drained(timeout_s=0.05) == ["not all orchestrators answer: x", "the remaining streams will be cut off"]


class Waits(threading.Event):
    """Remembers for how long somebody would have waited, and does not wait."""

    def __init__(self):
        super().__init__()
        self.asked_s = []

    def wait(self, timeout=None):
        self.asked_s.append(timeout)
        return False


def test_the_proxy_has_a_moment_for_the_last_words(answers, monkeypatch):
    monkeypatch.setattr(local, "FLUSH_S", 7.0)
    answers.append(0)
    waits = Waits()
    drained(stop_now=waits)
    assert waits.asked_s == [7.0]


def test_a_signal_that_is_ignored_stays_so_until_all_has_stopped():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with local._interrupted_by_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_cluster_that_does_not_start_says_so_in_a_line(monkeypatch):
    def fail(*_: object) -> None:
        raise Exception("no port is free\nTraceback: ...")  # noqa: TRY002  as Ray does it

    monkeypatch.setattr(cluster, "_start_ray", fail)
    monkeypatch.setattr(cluster, "prepare_environment", lambda: None)
    with (
        pytest.raises(StartupError, match=r"^Ray Serve could not be started on this machine: no port is free$"),
        cluster.local_cluster(1),
    ):
        pass


def test_serve_that_never_answers_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(application, "WIND_DOWN_TIMEOUT_S", 0.05)
    never = threading.Event()
    monkeypatch.setattr(application.serve, "get_app_handle", lambda _name: never.wait())
    with pytest.raises(Unavailable, match="not all orchestrators answer: TimeoutError"):
        application.wind_down()
    never.set()
