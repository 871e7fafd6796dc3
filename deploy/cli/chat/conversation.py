"""The messages of a conversation, and the input typed next.

Knows messages and lines; must not know servers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'
"""Begins and ends a message of several lines."""
_COMMAND = re.compile(r"/([a-z]+)(?: +(.*))?")


@dataclass(slots=True)
class Conversation:
    """Questions and answers in turn, after a system prompt if there is one."""

    system: str | None = None
    _messages: list[Mapping[str, str]] = field(default_factory=list)

    def asking(self, question: str) -> list[Mapping[str, str]]:
        """All messages of a request, with one more question."""
        before = [_message("system", self.system)] if self.system else []
        return [*before, *self._messages, _message("user", question)]

    def add(self, question: str, answer: str) -> None:
        """Keep a question and its answer as context for later questions."""
        self._messages += [_message("user", question), _message("assistant", answer)]

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self._messages.clear()


def _message(role: str, content: str) -> Mapping[str, str]:
    return {"role": role, "content": content}


def read_input(read: Callable[[str], str]) -> str:
    """The next message or command. `read` gets the prompt to show. Raises what `read` raises, mostly EOFError."""
    line = read(PROMPT)
    if not line.startswith(FENCE):
        return line.strip()
    lines = [line.removeprefix(FENCE)]
    with suppress(EOFError):  # the end of the input ends the message, too
        while not lines[-1].endswith(FENCE):
            lines.append(read(MORE))
    return "\n".join(lines).removesuffix(FENCE).strip()


def command_in(text: str) -> tuple[str, str] | None:
    """The name of a command and its argument; None for a message, even one that begins with a path such as /tmp."""
    found = _COMMAND.fullmatch(text)
    return (found[1], found[2] or "") if found else None
