"""The texts of `bench guessers`: prompts of five kinds, and given outputs for edits.

For code, prose, JSON and high-entropy samples, the demo target writes the outputs: after prompts from held-out files,
and for JSON under a schema. It is too small to copy text, so the outputs of edits are given as a capable target would
write them. Such a target is certain of them at any temperature.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from core.records import Grammar, GrammarKind
from models.train.corpus import load_split

PROMPT_CHARS = 400
EDIT_CHARS = 700
HIGH_TEMPERATURE = 1.5
ROW = {
    "id": {"type": "integer", "minimum": 1000, "maximum": 9999},
    "user": {"enum": ["alice", "bob", "carol", "dave"]},
    "status": {"enum": ["done", "failed", "running"]},
    "seconds": {"type": "integer", "minimum": 0, "maximum": 90},
    "tags": {"type": "array", "items": {"enum": ["new", "batch", "paid", "eu", "retry"]}, "minItems": 1, "maxItems": 3},
}
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": ROW, "required": [*ROW], "additionalProperties": False},
    "minItems": 8,
    "maxItems": 8,
}
SHOWN_ROWS = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind, and their outputs."""

    name: str
    temperature: float
    prompts: Sequence[str]
    outputs: Sequence[str] = ()
    """Outputs, if they are given; else the target writes them."""
    grammar: Grammar | None = None
    """Grammar of the outputs."""

    @property
    def title(self) -> str:
        return f"{self.name}, T = {self.temperature:g}"


def workloads(num_texts: int) -> Iterator[Workload]:
    """Each kind at temperatures 0 and 1, and high entropy at a temperature of its own.

    There are twice as many JSON texts, since they are short: with eight of them, one pass more or less is 1%.
    """
    code, prose = list(_pieces(num_texts)), list(_docstrings(num_texts))
    json_prompts = list(_json_prompts(2 * num_texts))
    edits, edited = zip(*_edits(num_texts), strict=True)
    for temperature in (0.0, 1.0):
        yield Workload("code completion", temperature, code)
        yield Workload("docstring prose", temperature, prose)
        yield Workload("copy-heavy editing", temperature, edits, edited)
        yield Workload("JSON", temperature, json_prompts, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    yield Workload("high-entropy sampling", HIGH_TEMPERATURE, code)


@cache
def _held_out() -> Sequence[str]:
    """Held-out files, which neither model of the demo pair has seen."""
    return [document.text for document in load_split().held_out if len(document.text) > 2 * EDIT_CHARS]


def _pieces(num_texts: int, num_chars: int = PROMPT_CHARS) -> Iterator[str]:
    """Pieces of held-out files, each beginning at a line."""
    dice = Random(1)
    for _ in range(num_texts):
        text = dice.choice(_held_out())
        start = text.rfind("\n", 0, dice.randrange(len(text) - num_chars)) + 1
        yield text[start : start + num_chars]


def _docstrings(num_texts: int) -> Iterator[str]:
    """Beginnings of long docstrings of held-out files."""
    found = [
        doc
        for text in _held_out()
        for doc in re.findall(r'"""(.+?)"""', text, flags=re.DOTALL)
        if len(doc) > 2 * PROMPT_CHARS
    ]
    for doc in Random(2).sample(found, num_texts):
        yield f'    """{doc[:PROMPT_CHARS]}'


def _edits(num_texts: int) -> Iterator[tuple[str, str]]:
    """(prompt, output): a piece of code with an edit request, and the piece with its most frequent name changed."""
    for piece in _pieces(num_texts, EDIT_CHARS):
        names = re.findall(r"\b[a-z_]{4,}\b", piece)
        name = max(sorted(set(names)), key=names.count)
        yield f"# {name} renamed to new_{name}\n{piece}\n\n# new:\n", re.sub(rf"\b{name}\b", f"new_{name}", piece)


def _json_prompts(num_texts: int) -> Iterator[str]:
    """Examples of the wanted records. The schema is not in the prompt."""
    for seed in range(num_texts):
        yield json.dumps(list(_rows(Random(seed), SHOWN_ROWS))) + "\n"


def _rows(dice: Random, num_rows: int) -> Iterator[Mapping[str, object]]:
    for number in range(num_rows):
        yield {
            "id": 1000 + number,
            "user": dice.choice(("alice", "bob", "carol", "dave")),
            "status": dice.choice(("done", "done", "failed")),
            "seconds": dice.randrange(90),
            "tags": dice.sample(("new", "batch", "paid", "eu", "retry"), 2),
        }
