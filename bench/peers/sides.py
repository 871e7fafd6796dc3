"""One side of a comparison: a server in a process, asked by HTTP.

Knows OpenAI's routes; must not know whose server it is.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from core.errors import StartupError

NUM_TOKENS = 96
START_S = 300.0
QUESTIONS = {
    "chat": (
        "Tell me about rivers.",
        "Why is the sky blue?",
        "What is a prime number?",
        "How do birds fly?",
        "Describe a forest in autumn.",
        "What do bees do all day?",
        "How is bread made?",
        "Why do we sleep?",
    ),
    "code": (
        "Write a Python function that counts the words of a text.",
        "Write a Python class for a stack with push and pop.",
        "Write a Python function that reads a CSV file into dictionaries.",
        "Write a Python function that finds the prime numbers up to n.",
    ),
}
STUB = "def count_words(text):\n    # variant {variant}\n    "
"""Prompt for a model without a chat template."""


@dataclass(frozen=True, slots=True)
class Side:
    """A server that answers at a port of this machine."""

    name: str
    port: int
    is_chat: bool
    """Whether the model has a chat template."""
    max_streams: int
    """More are not asked of it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request."""

    def ask(self, kinds: Sequence[str], num_streams: int, repeat: int) -> tuple[float, list[str]]:
        """Tokens per second of streams that begin together, and their texts. Each repeat has prompts of its own."""
        questions = [question(kinds[n % len(kinds)], n // len(kinds), f"{repeat}.{n}") for n in range(num_streams)]
        with ThreadPoolExecutor(num_streams) as pool:
            began_s = time.perf_counter()
            answers = [*pool.map(self._answer, questions)]
            took_s = time.perf_counter() - began_s
        return sum(count for count, _ in answers) / took_s, [text for _, text in answers]

    def is_answering(self) -> bool:
        try:
            self._answer("Hello")
        except OSError:
            return False
        return True

    def _answer(self, question: str) -> tuple[int, str]:
        model = _post(self.port, "/v1/models")["data"][0]["id"]
        body = {"model": model, "max_tokens": NUM_TOKENS, "temperature": 0, **self.options}
        if self.is_chat:
            messages = [{"role": "user", "content": question}]
            answer = _post(self.port, "/v1/chat/completions", {**body, "messages": messages})
            return answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]
        answer = _post(self.port, "/v1/completions", {**body, "prompt": STUB.format(variant=question)})
        return answer["usage"]["completion_tokens"], answer["choices"][0]["text"]


def question(kind: str, number: int, variant: str) -> str:
    return f"{QUESTIONS[kind][number % len(QUESTIONS[kind])]} ({variant})"


@contextmanager
def running(side: Side, process: subprocess.Popen[bytes]) -> Iterator[Side]:
    """Wait until the server answers; end it after the `with` block. Raises: StartupError."""
    try:
        end_s = time.monotonic() + START_S
        while not side.is_answering():
            if process.poll() is not None or time.monotonic() > end_s:
                raise StartupError(f"{side.name} does not answer on port {side.port}")
            time.sleep(1)
        yield side
    finally:
        process.terminate()
        process.wait(60)


def _post(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_S) as response:
        return json.load(response)
