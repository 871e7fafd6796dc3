"""Compiles the text of a grammar with llguidance, and computes masks of the tokens that it allows.

The library's own limits bound the cost, not a clock, so that compilation stops at the same point each time.
(docs/adr/grammars.md has the measurements.)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from core.errors import CheckpointError
from core.records import Grammar, GrammarKind
from core.speculation import BadGuesserInput
from workers.grammar.deep_stack import call_deeply
from workers.grammar.divisors import problem_of_divisors
from workers.vocabulary import read_tokenizer

Mask: TypeAlias = NDArray[np.uint8]
"""Allowed tokens: one bit for each token, the lowest bit of a byte first."""

LIMITS = LLParserLimits(max_grammar_size=100_000, max_lexer_states=20_000, step_max_items=5_000, verbose_errors=False)
"""A lexer state takes one or two kilobytes. With an ambiguous grammar, a mask takes longer with each token of the
output; at 5,000 parser items it takes 20 ms and is refused. The library's own limit of 50,000 would allow 400 ms, in
which all sessions of the engine wait."""
WHITESPACE = r" |\n[ \t]{0,20}"
"""Whitespace between the parts of JSON: what people and libraries write, but bounded."""
JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False}
MAX_PROBLEM_CHARS = 300
"""Limit on a library's message, which may quote the whole grammar."""
OWN_MESSAGES = {
    "oneOf constraints are not supported": "oneOf is held to where its alternatives differ in type, or in a required "
    "property that is constant in each: use anyOf",
    "lexer precomputation failed": "it is too large",
}
"""Replacements for messages that name options of the library, which callers cannot set."""
DEAD_END = "NoExtensionBias"
"""The library's error for a state in which no token is allowed."""
NO_MATCH = "no output that begins so satisfies it"


class GrammarProblem(BadGuesserInput):
    """A grammar does not compile, or cannot be followed any further."""


@dataclass(eq=False, slots=True)
class CompiledGrammar:
    """The state before the first token, which each sequence of the grammar copies."""

    start: LLMatcher
    vocab_size: int
    eos_token_ids: frozenset[int]
    is_exhausted: bool = False
    """Whether the state that its sequences share is full, so that every later sequence would fail at once."""

    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether an output that matches the grammar may begin with these tokens."""
        return self.start.deep_copy().try_consume_tokens(list(tokens)) == len(tokens)


class GrammarCompiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)

    @classmethod
    def of_model(cls, directory: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
        """Compiler for a checkpoint's tokenizer. Holds the interpreter lock, for seconds if the vocabulary is large.

        Raises: GrammarProblem if the library cannot read the tokenizer, or the model has no end-of-sequence token.
        """
        if not eos_token_ids:
            raise GrammarProblem("the model has no end-of-sequence token, which has to end what a grammar allows")
        try:
            text = _text_of(read_tokenizer(Path(directory)).backend_tokenizer.to_str(), vocab_size)
            tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except (CheckpointError, ValueError) as error:
            raise GrammarProblem(f"the tokenizer of {directory} does not serve grammars: {error}") from error
        return cls(tokenizer, vocab_size, eos_token_ids)

    @classmethod
    def of_bytes(cls) -> GrammarCompiler:
        """Compiler for a vocabulary of all bytes: checks whether a grammar compiles without a model's tokenizer."""
        return cls(LLTokenizer(TokenizerWrapper(_Bytes()), slices=[]), _Bytes.eos_token_id + 1, [_Bytes.eos_token_id])

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, mostly without holding the interpreter lock. Raises: GrammarProblem."""
        return call_deeply(partial(self._compile, grammar))

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if grammar.kind is not GrammarKind.REGEX and (problem := problem_of_divisors(grammar.text)) is not None:
            raise GrammarProblem(_shortened(problem))
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise problem_of(matcher)
        if warnings := matcher.get_grammar_warnings():  # part of a schema would be ignored
            raise GrammarProblem(_shortened(warnings[0]))
        compiled = CompiledGrammar(matcher, self.vocab_size, self._eos_token_ids)
        mask_of(compiled.start.deep_copy(), compiled)  # checks that a first token exists and can be found within limits
        return compiled


def _text_of(tokenizer: str, vocab_size: int) -> str:
    """The tokenizer without added tokens that the model has no rows for: the library refuses those."""
    parts = json.loads(tokenizer)
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < vocab_size]
    return json.dumps(parts)


def mask_of(matcher: LLMatcher, compiled: CompiledGrammar) -> Mask:
    """Mask of the tokens allowed next. End-of-sequence tokens are allowed if the output so far is complete.

    Raises: GrammarProblem.
    """
    packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: -(-compiled.vocab_size // 8)].copy()
    if matcher.is_error():
        raise problem_of(matcher)
    is_whole = matcher.is_accepting()
    for token_id in compiled.eos_token_ids:
        bit = np.uint8(1 << (token_id & 7))
        packed[token_id >> 3] = packed[token_id >> 3] | bit if is_whole else packed[token_id >> 3] & ~bit
    if not packed.any():
        raise GrammarProblem(NO_MATCH)
    return packed


def problem_of(matcher: LLMatcher) -> GrammarProblem:
    """The matcher's error as a GrammarProblem."""
    problem = matcher.get_error()
    return GrammarProblem(NO_MATCH if problem.startswith(DEAD_END) else _shortened(problem))


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own format. Raises: GrammarProblem."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarProblem(_shortened(str(error))) from None


def _shortened(problem: str) -> str:
    """The first line of a message, plus a regular expression's parse error; other lines quote the grammar."""
    for start, told in OWN_MESSAGES.items():
        if start in problem:
            return told
    first, *others = problem.strip().split("\n")
    named = next((line for line in others if line.startswith("error: ")), None)
    line = first if named is None else f"{first.removesuffix(' regex parse error:')} {named.removeprefix('error: ')}"
    return line if len(line) <= MAX_PROBLEM_CHARS else line[:MAX_PROBLEM_CHARS] + "..."


class _Bytes:
    """A tokenizer with one token for each byte, in the interface that the library expects."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
