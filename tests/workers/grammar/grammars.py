"""Grammars for tests, and how to ask about them by text."""

import json
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from core.records import Grammar, GrammarKind
from workers.grammar.compiler import GrammarCompiler
from workers.grammar.state import GrammarState

DEMO = Path(__file__).parents[3] / "models" / "demo" / "target"
VOCAB_SIZE = 4096
EOS = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "likes": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "likes"],
    "additionalProperties": False,
}


def schema(value):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text):
    return Grammar(GrammarKind.REGEX, text)


def lark(text):
    return Grammar(GrammarKind.LARK, text)


@cache
def tokenizer():
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def ids(text):
    return tokenizer().encode(text, add_special_tokens=False).ids


@cache
def compiler():
    return GrammarCompiler.of_model(DEMO, VOCAB_SIZE, (EOS,))


def at_once(grammar, by=None):
    """A compilation as states ask for it."""
    future = Future()
    try:
        future.set_result((by or compiler()).compile(grammar))
    except ValueError as problem:
        future.set_exception(problem)
    return future


def state(grammar):
    return GrammarState(grammar, lambda: at_once(grammar), VOCAB_SIZE)


def allowed(mask):
    """The ids that a mask lets through."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")[:VOCAB_SIZE]).tolist()


def following(grammar, output):
    """The ids that may follow, asked of a new state."""
    (mask,) = state(grammar).masks(output, [()])
    return None if mask is None else allowed(mask)
