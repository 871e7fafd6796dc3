"""Requests of one caller whose outputs resemble each other, as in an agent's loop; and some that do not.

The texts come from this repository or are random, not from a model. They show what a guesser finds, not how a target
would answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from random import Random
from typing import Final

from orchestrator.text import Tokenizer

Exchange = tuple[list[int], list[int]]
"""A prompt and its output."""

NUM_REQUESTS: Final = 8
NAMES: Final = ("policy", "known", "costs", "depth", "nodes", "config", "request", "gamma")
"""Names in a file; each edit changes one of them."""
VERBS: Final = ("list", "count", "sum up", "check", "find", "show", "sort", "join")


def loops(tokenizer: Tokenizer, edited: str, prose: str) -> Mapping[str, list[Exchange]]:
    """Requests in order, by kind."""
    kinds: Mapping[str, Iterable[tuple[str, str]]] = {
        "the file, edited again": ((f"{edited}\n# {name}s:\n", _renamed(edited, name)) for name in NAMES),
        "the file unseen, written again": ((f"# with {name}s:\n", _renamed(edited, name)) for name in NAMES),
        "records of one schema": _records(),
        "other parts of a text": _parts(prose),
    }
    return {
        kind: [(list(tokenizer.encode(prompt)), list(tokenizer.encode(output))) for prompt, output in exchanges]
        for kind, exchanges in kinds.items()
    }


def _renamed(text: str, name: str) -> str:
    return re.sub(rf"\b{name}\b", f"{name}s", text)


def _records() -> Iterator[tuple[str, str]]:
    """Tool calls of one form. The prompts do not show the form."""
    dice = Random(3)
    for verb in VERBS:
        calls = [
            {
                "tool": dice.choice(("search_files", "read_file", "run_tests")),
                "arguments": {"path": f"src/{dice.choice(NAMES)}.py", "limit": dice.randrange(100), "recursive": True},
                "reason": f"to {verb} the {dice.choice(NAMES)} of module {dice.randrange(1000)}",
            }
            for _ in range(3)
        ]
        yield f"{verb} what has changed:\n", json.dumps(calls, indent=2)


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Parts of a text. The first fifth of each is the prompt, the rest the output."""
    edges = [len(text) * number // NUM_REQUESTS for number in range(NUM_REQUESTS + 1)]
    for first, end in pairwise(edges):
        middle = first + (end - first) // 5
        yield text[first:middle], text[middle:end]
