"""`outrider chat`: a conversation with a server's model, whose answers are streamed.

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
from deploy.cli.chat.conversation import FENCE, Conversation, command_in, read_input
from deploy.cli.jobs import MAX_RETRIES, CallOptions, Job, bearer_token, explain, problem_of_call
from outrider_client import Client, OutriderError, Retry

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""The status that shells report for SIGINT."""
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

    Ctrl-C stops an answer, Ctrl-D leaves, /help shows more. If standard input is not a terminal, its lines are
    sent one after the other. The environment variable OUTRIDER_TOKEN holds the token for a server that requires one.
    """

    system: Annotated[str | None, Option(metavar="TEXT", help="System prompt.")] = None


def chat(options: ChatOptions) -> int:
    """Returns the exit status."""
    if (problem := problem_of_call(options)) is not None:
        terminal.say(f"outrider: {problem}")
        return EXIT_FAILED
    is_typed = sys.stdin.isatty() and sys.stdout.isatty()
    with Client(options.address, token=bearer_token(), retry=Retry(max_retries=MAX_RETRIES)) as client:
        session = _ChatSession(client, options)
        return session.with_person() if is_typed else session.with_lines()


class _ChatSession:
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
        """Converse in a terminal. An error is shown, and the conversation continues. Returns the exit status."""
        import readline  # noqa: F401 - lets `input` edit lines and recall earlier ones

        if not self._greet():
            return EXIT_FAILED
        while True:
            try:
                self._take(read_input(input))
            except OutriderError as error:
                self._print_error(error)
            except KeyboardInterrupt:
                _end_line()
            except EOFError:
                _end_line()
                return 0

    def with_lines(self) -> int:
        """Send the messages from standard input, up to its end or the first error. Returns the exit status."""
        while True:
            try:
                self._take(read_input(lambda _: input()))
            except OutriderError as error:
                self._print_error(error)
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
            self._print_error(error)
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
        """Ask, and keep the answer: a stopped one as far as it was shown, but not a failed one, nor its question."""
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
        """Run the job in another thread: a signal inside gRPC's own code could make it wait forever."""
        stream = job.stream(self._client)
        with ThreadPoolExecutor(1) as pool:
            try:  # includes `submit`, because leaving the pool waits for an answer that is not cancelled
                pool.submit(job.read, stream, self._write).result()
            finally:
                stream.close()

    def _keep(self, question: str, job: Job) -> None:
        if answer := "".join(chunk.text for chunk in job.chunks):
            self._conversation.add(question, answer)

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None

    def _print_error(self, error: OutriderError) -> None:
        sys.stdout.flush()
        terminal.say(f"outrider: {explain(error, self._client, self._options.address)}")


def _end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
