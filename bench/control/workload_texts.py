"""The texts of `bench guessers`: prompts of five kinds, and how they go on where the demo target could not write it.

Code, prose, JSON and high-entropy samples are what the demo target writes after these prompts: of its held-out files,
and for JSON under a schema that masks its rows. It is too small to copy: edits are given texts, as a target that can
would have written them. Such a target is sure of them at any temperature.
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
    """Prompts of one kind, and how they go on."""

    name: str
    temperature: float
    prompts: Sequence[str]
    outputs: Sequence[str] = ()
    """Where they are given; else the target writes them."""
    grammar: Grammar | None = None
    """Of the outputs."""

    @property
    def title(self) -> str:
        return f"{self.name}, T = {self.temperature:g}"


def workloads(num_texts: int) -> Iterator[Workload]:
    """Each kind at temperatures 0 and 1; high entropy is a temperature.

    Of JSON there are twice as many texts, since they are short: of eight, one pass more or less is 1%.
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
    """Files that neither model of the demo pair has seen."""
    return [document.text for document in load_split().held_out if len(document.text) > 2 * EDIT_CHARS]


def _pieces(num_texts: int, num_chars: int = PROMPT_CHARS) -> Iterator[str]:
    """Of files, each beginning with a line."""
    dice = Random(1)
    for _ in range(num_texts):
        text = dice.choice(_held_out())
        start = text.rfind("\n", 0, dice.randrange(len(text) - num_chars)) + 1
        yield text[start : start + num_chars]


def _docstrings(num_texts: int) -> Iterator[str]:
    """The first halves of long ones."""
    found = [
        doc
        for text in _held_out()
        for doc in re.findall(r'"""(.+?)"""', text, flags=re.DOTALL)
        if len(doc) > 2 * PROMPT_CHARS
    ]
    for doc in Random(2).sample(found, num_texts):
        yield f'    """{doc[:PROMPT_CHARS]}'


def _edits(num_texts: int) -> Iterator[tuple[str, str]]:
    """A piece of code, and the same with its most frequent name changed: what an editor is asked for."""
    for piece in _pieces(num_texts, EDIT_CHARS):
        names = re.findall(r"\b[a-z_]{4,}\b", piece)
        name = max(sorted(set(names)), key=names.count)
        yield f"# {name} renamed to new_{name}\n{piece}\n\n# new:\n", re.sub(rf"\b{name}\b", f"new_{name}", piece)


def _json_prompts(num_texts: int) -> Iterator[str]:
    """An example of what is asked for; the schema is not shown."""
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
