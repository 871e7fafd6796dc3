"""`outrider chat`: ask a server's model in turn, and see its answers as they are made.

Knows options, the client and terminals. Imports neither Ray nor torch, so it starts at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from deploy.cli import terminal
from deploy.cli.chat.conversation import FENCE, Conversation, command_in, typed
from deploy.cli.jobs import MAX_RETRIES, CallOptions, Job, bearer_token, explain, problem_of_token
from outrider_client import Client, OutriderError, Retry

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""As shells have it for SIGINT."""
HELP = f"""\
/reset         forget what has been said, and keep the system prompt
/system TEXT   set the system prompt; without TEXT there is none
/help          show this
{FENCE}            begins and ends a message of several lines
Ctrl-C         stops the answer, or drops what has been typed
Ctrl-D         leaves"""


@dataclass(frozen=True)
class ChatOptions(CallOptions):
    """Chat with a server's model in the terminal, by its own chat template.

    Ctrl-C stops an answer, Ctrl-D leaves, /help shows more. Lines of a standard input that is no terminal are asked
    one after the other. The environment variable OUTRIDER_TOKEN holds the token for a server that requires one.
    """

    system: Annotated[str | None, Option(metavar="TEXT", help="System prompt.")] = None


def chat(options: ChatOptions) -> int:
    """Returns the exit status."""
    if (problem := problem_of_token()) is not None:
        terminal.say(f"outrider: {problem}")
        return EXIT_FAILED
    is_typed = sys.stdin.isatty() and sys.stdout.isatty()
    with Client(options.address, token=bearer_token(), retry=Retry(max_retries=MAX_RETRIES)) as client:
        talk = _Talk(client, options)
        return talk.with_person() if is_typed else talk.with_lines()


class _Talk:
    """One conversation with one server."""

    def __init__(self, client: Client, options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self._conversation = Conversation(options.system)
        is_colored = terminal.use_color(options.color, sys.stdout, bool(os.environ.get("NO_COLOR")))
        self._write = terminal.Writer(sys.stdout, terminal.token_text(client, options.model) if is_colored else None)
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: terminal.say(HELP),
            "reset": lambda _: self._conversation.reset(),
            "system": self._set_system,
        }

    def with_person(self) -> int:
        """Errors are told, and the conversation goes on. Returns the exit status."""
        import readline  # noqa: F401 - lets `input` edit lines, and go back to those before

        if not self._greet():
            return EXIT_FAILED
        while True:
            try:
                self._take(typed(input))
            except OutriderError as error:
                self._tell(error)
            except KeyboardInterrupt:
                _end_line()
            except EOFError:
                _end_line()
                return 0

    def with_lines(self) -> int:
        """The first error is the end. Returns the exit status."""
        while True:
            try:
                self._take(typed(lambda _: input()))
            except OutriderError as error:
                self._tell(error)
                return EXIT_FAILED
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED
            except EOFError:
                return 0

    def _greet(self) -> bool:
        """Name the model; returns whether a server answers."""
        try:
            info = self._client.model_info(model=self._options.model)
        except OutriderError as error:
            self._tell(error)
            return False
        terminal.say(f"{info.model} at {self._options.address}; /help shows what can be typed, Ctrl-D leaves")
        return True

    def _take(self, text: str) -> None:
        """Raises: OutriderError, KeyboardInterrupt."""
        command = command_in(text)
        if command is None:
            if text:
                self._ask(text)
        elif (run := self._commands.get(command[0])) is not None:
            run(command[1])
        else:
            terminal.say(f"there is no command /{command[0]}; /help shows those that there are")

    def _ask(self, question: str) -> None:
        """An answer that is stopped is kept as far as it was shown; one that fails is dropped with its question."""
        job = Job("", {**self._options.fields(), "messages": self._conversation.asking(question)})
        try:
            self._run(job)
        except KeyboardInterrupt:
            self._keep(question, job)
            raise
        self._keep(question, job)
        _end_line()
        terminal.say(terminal.summary(job))

    def _run(self, job: Job) -> None:
        """In another thread: gRPC's own code, interrupted at a bad moment, would wait for ever."""
        stream = job.stream(self._client)
        with ThreadPoolExecutor(1) as pool:
            try:  # around the beginning, too: an answer that nobody cancels would be waited for
                pool.submit(job.read, stream, self._write).result()
            finally:
                stream.close()

    def _keep(self, question: str, job: Job) -> None:
        if answer := "".join(chunk.text for chunk in job.chunks):
            self._conversation.add(question, answer)

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None

    def _tell(self, error: OutriderError) -> None:
        sys.stdout.flush()
        terminal.say(f"outrider: {explain(error, self._client, self._options.address)}")


def _end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
