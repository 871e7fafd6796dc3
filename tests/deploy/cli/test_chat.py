"""`outrider chat` against a real gRPC server that answers as a test has written down."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pytest

from deploy.cli import main
from deploy.cli.chat import command
from deploy.cli.chat.conversation import Conversation, command_in, read_input
from outrider_client._proto import generation_pb2 as pb
from tests.clients.scripted import Refusal, Scripted, chunk, listening

ANSWER = [chunk(1, 2, total=2), chunk(3, total=3, is_last=True)]
"""Its text is 123."""
WAIT_S = 30.0
CTRL_C, CTRL_D = "\x03", "\x04"


def run(lines: str, scripted: Scripted, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    with listening(scripted) as address:
        return main.main(["chat", "--address", address, *options])


def said(request: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


@pytest.fixture(autouse=True)
def _interruptible():
    """Use Python's own handler. A shell makes what it runs in the background, and its children, ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Lines of a standard input that is no terminal


def test_each_line_is_asked_after_what_was_said_before(monkeypatch, capsys):
    scripted = Scripted(ANSWER)
    assert run("one\n\n two \n", scripted, monkeypatch, "--system", "be brief") == 0
    first, second = map(said, scripted.requests)
    assert first == [("system", "be brief"), ("user", "one")]
    assert second == [*first, ("assistant", "123"), ("user", "two")]
    out, err = capsys.readouterr()
    assert out == "123\n123\n"
    assert err.count("3 tokens; ") == 2


def test_the_options_are_those_of_generate(monkeypatch):
    scripted = Scripted(ANSWER)
    flags = "--model m --max-tokens 9 --temperature 0.5 --top-k 3 --seed 8 --stop a --verification block --no-draft"
    assert run("one\n", scripted, monkeypatch, *flags.split()) == 0
    request = scripted.requests[0]
    assert (request.model, request.stopping.max_tokens, request.stopping.stop) == ("m", 9, ["a"])
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 3, 8)
    assert request.speculation.verification == pb.VERIFICATION_BLOCK
    assert request.speculation.max_draft_tokens == 0


def test_a_reset_forgets_all_but_the_system_prompt(monkeypatch):
    scripted = Scripted(ANSWER)
    run("one\n/system  be kind\n/reset\ntwo\n/system\nthree\n", scripted, monkeypatch)
    _, second, third = map(said, scripted.requests)
    assert second == [("system", "be kind"), ("user", "two")]
    assert third == [("user", "two"), ("assistant", "123"), ("user", "three")]


def test_help_and_what_is_no_command_are_told_and_not_asked(monkeypatch, capsys):
    scripted = Scripted(ANSWER)
    assert run("/help\n/halp\n", scripted, monkeypatch) == 0
    assert not scripted.requests
    err = capsys.readouterr().err
    assert "/reset" in err
    assert "there is no command /halp" in err


def test_the_first_error_ends_what_is_piped_and_says_what_the_server_said(monkeypatch, capsys):
    scripted = Scripted([Refusal(grpc.StatusCode.INVALID_ARGUMENT, "chat: this model has no chat template")])
    assert run("one\ntwo\n", scripted, monkeypatch) == 1
    assert len(scripted.requests) == 1
    assert capsys.readouterr().err == "outrider: INVALID_ARGUMENT: chat: this model has no chat template\n"


def test_without_a_server_the_user_is_told_how_to_start_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert main.main(["chat", "--address", "localhost:1"]) == 1
    assert "start one with: outrider serve" in capsys.readouterr().err


def test_an_interrupt_while_lines_are_piped_cancels_the_call_and_ends(monkeypatch):
    def interrupt(context: Any) -> None:
        main_thread = threading.main_thread().ident
        _until(lambda: sys._current_frames()[main_thread].f_code.co_name == "wait")  # for the answer
        signal.pthread_kill(main_thread, signal.SIGINT)
        _until(lambda: not context.is_active())

    scripted = Scripted([chunk(1, total=1), interrupt])
    assert run("one\ntwo\n", scripted, monkeypatch) == 130
    assert scripted.is_cancelled.wait(WAIT_S)
    assert len(scripted.requests) == 1


class InterruptedAtOnce(ThreadPoolExecutor):
    """Ctrl-C comes as soon as the answer has begun."""

    def submit(self, *args: Any, **settings: Any) -> Any:
        super().submit(*args, **settings)
        raise KeyboardInterrupt


def test_an_interrupt_as_an_answer_begins_cancels_the_call_too(monkeypatch):
    scripted = Scripted([lambda context: _until(lambda: not context.is_active())])
    monkeypatch.setattr(command, "ThreadPoolExecutor", InterruptedAtOnce)
    assert run("one\ntwo\n", scripted, monkeypatch) == 130
    assert len(scripted.requests) <= 1


# In a terminal


class Person:
    """Types into the command, in a terminal of its own."""

    def __init__(self, address: str) -> None:
        self._terminal, theirs = pty.openpty()
        owned = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"  # so that Ctrl-C is a signal
        code = f"{owned}; from deploy.cli.main import main; raise SystemExit(main())"
        argv = [sys.executable, "-c", code, "chat", "--address", address, "--color", "never"]
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"}, start_new_session=True
        )
        os.close(theirs)
        self._seen = ""

    def types(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def sees(self, text: str, patience_s: float = WAIT_S) -> None:
        end_s = time.monotonic() + patience_s
        while text not in self._seen:
            if not select.select([self._terminal], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise TimeoutError(f"there is no {text!r} in {self._seen!r}")
            self._seen += os.read(self._terminal, 4096).decode()
        self._seen = self._seen.partition(text)[2]

    def interrupts(self) -> None:
        """Until there is a prompt, as a person does: Python has a signal that comes before it waits wait as well."""
        for _ in range(10):
            self.types(CTRL_C)
            with suppress(TimeoutError):
                return self.sees(">>> ", WAIT_S / 10)
        raise TimeoutError("no interrupt was heard")

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def test_a_person_stops_an_answer_goes_on_and_leaves():
    def until_cancelled(context: Any) -> None:
        _until(lambda: not context.is_active())

    info = pb.GetModelInfoResponse(model="pair", verification=pb.VERIFICATION_COUPLED)
    refusal = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "chat.messages: too long")
    scripted = Scripted([info], [chunk(7, total=1), until_cancelled], ANSWER, [refusal], ANSWER)
    with listening(scripted) as address, Person(address) as person:
        person.sees("pair at localhost")
        person.sees(">>> ")
        person.types("one\n")
        person.sees("7")
        person.interrupts()
        assert scripted.is_cancelled.wait(WAIT_S)
        for text, answer in (("two", "123"), ("three", "too long"), ("four", "123")):
            person.types(f"{text}\n")
            person.sees(answer)
            person.sees(">>> ")
        person.types("dropped")
        person.sees("dropped")
        person.interrupts()
        person.types(CTRL_D)
        assert person.process.wait(WAIT_S) == 0
    asked = [said(request) for request in scripted.requests[1:]]
    stopped = [("user", "one"), ("assistant", "7")]
    assert asked[1] == [*stopped, ("user", "two")]
    assert asked[3] == [*stopped, ("user", "two"), ("assistant", "123"), ("user", "four")], "what failed is dropped"


def _until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.01)


# Input


def reading(lines: str) -> Callable[[str], str]:
    rest = iter(lines.splitlines())

    def read(_: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    return read


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (" one \ntwo", "one"),
        ('"""one\n\n two\n"""\nthree', "one\n\n two"),
        ('"""one"""', "one"),
        ('"""\none', "one"),
        ('""""""', ""),
    ],
)
def test_a_message_is_a_line_or_what_stands_between_two_fences(lines, message):
    assert read_input(reading(lines)) == message


def test_nothing_more_is_the_end():
    with pytest.raises(EOFError):
        read_input(reading(""))


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/reset", ("reset", "")),
        ("/system be  kind", ("system", "be  kind")),
        ("/etc/hosts has what?", None),
        ("/reset\nand more", None),
        ("and /reset", None),
    ],
)
def test_a_command_is_one_line_that_begins_with_its_name(text, command):
    assert command_in(text) == command


def test_a_question_is_kept_with_its_answer_alone():
    talk = Conversation()
    assert talk.asking("one") == talk.asking("one"), "asking keeps nothing"
    talk.add("one", "1")
    assert [message["content"] for message in talk.asking("two")] == ["one", "1", "two"]
