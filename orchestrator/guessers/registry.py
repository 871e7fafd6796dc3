"""Registry of guessers, by the names used in requests and settings. A new guesser is one line here, and its file.

Knows settings; must not know sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.ports import ForcedTokens, Grammars
from core.records import Grammar
from core.speculation import DRAFT, Guesser, SourcePrecision
from orchestrator.guessers.breaker import Breaker
from orchestrator.guessers.corpus import CorpusIndex, CorpusTable, Retrieval
from orchestrator.guessers.grammar import TEMPLATE_CHANCE, GrammarGuesser
from orchestrator.guessers.head import HeadGuesses
from orchestrator.guessers.lookahead import Lookahead
from orchestrator.guessers.ngram import NgramTables
from orchestrator.guessers.panel import Panel
from orchestrator.guessers.prompt_lookup import PromptLookup
from orchestrator.guessers.random_tokens import RandomTokens
from orchestrator.guessers.suffix import Histories, History, SuffixIndex
from orchestrator.text import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The output's start in the text, its grammars, and its owner."""

    prompt_len: int = 0
    grammar: Grammar | None = None
    template: Grammar | None = None
    """Usual form of the output. A request with a template always uses the guesser of that name."""
    isolation: str = ""
    """Name of the caller or tenant whose recent outputs may be used as guesses; empty for none."""

    @property
    def forms(self) -> Mapping[str, Grammar]:
        """Grammars by the name of the guesser that uses them."""
        forms = {"grammar": self.grammar, "template": self.template}
        return {name: form for name, form in forms.items() if form is not None}


UNCONSTRAINED = OutputForm()


@dataclass(frozen=True, slots=True)
class GuesserInputs:
    """Inputs for creating a session's guesser."""

    config: SpeculationConfig
    max_depth: int
    """Maximum useful depth of guesses."""
    index: CorpusIndex | None = None
    """Index of a corpus, if configured."""
    prompt_len: int = 0
    forced: Mapping[str, ForcedTokens] = field(default_factory=dict)
    """Forced tokens, by the keys of `OutputForm.forms`. A missing form has no guesser."""
    history: History | None = None
    """Recent outputs of the same caller or tenant."""
    vocab_size: int = 0
    """Used only by `random`, which fails at 0."""

    @property
    def corpus(self) -> CorpusIndex:
        assert self.index is not None, "settings and requests name who needs an index only where there is one"
        return self.index


HEAD = "head"
"""Name of the head in the target's engine. It guesses where the target has one."""
GUESSERS: Mapping[str, Callable[[GuesserInputs], Guesser]] = {
    "prompt_lookup": lambda inputs: PromptLookup(
        inputs.max_depth,
        min_match=inputs.config.lookup_min_match,
        max_match=inputs.config.lookup_max_match,
        by_frequency=inputs.config.lookup_continuation == "most_frequent",
        num_branches=inputs.config.lookup_branches,
    ),
    "ngram": lambda inputs: NgramTables(inputs.max_depth, inputs.config.q_top_tokens),
    "grammar": lambda inputs: GrammarGuesser(inputs.forced["grammar"], inputs.prompt_len, inputs.max_depth),
    "template": lambda inputs: GrammarGuesser(
        inputs.forced["template"], inputs.prompt_len, inputs.max_depth, TEMPLATE_CHANCE
    ),
    "suffix": lambda inputs: SuffixIndex(inputs.max_depth, inputs.history, inputs.prompt_len),
    "retrieval": lambda inputs: Retrieval(inputs.corpus, inputs.max_depth),
    "random": lambda inputs: RandomTokens(inputs.vocab_size, inputs.max_depth),
    "unigram": lambda inputs: CorpusTable(inputs.corpus, 1, inputs.max_depth, inputs.config.q_top_tokens),
    "bigram": lambda inputs: CorpusTable(inputs.corpus, 2, inputs.max_depth, inputs.config.q_top_tokens),
    "lookahead": lambda inputs: Lookahead(
        inputs.max_depth, window=inputs.config.lookahead_window, ngram=inputs.config.lookahead_ngram
    ),
    HEAD: lambda _inputs: HeadGuesses(),
}
"""Factory of each guesser, by name."""
ASKING = frozenset({"lookahead"})
"""Guessers that learn from the target's answers. They find nothing in text that already exists."""
CONTROLS = ("random", "unigram", "bigram")
"""Guessers used as controls in experiments, not for speed."""
NEED_INDEX = ("retrieval", "unigram", "bigram")
"""Guessers that need a corpus index."""
BY_TEXT = tuple(name for name in GUESSERS if name not in ("grammar", "template", HEAD))
"""Guessers that work on any text. The others need the request to describe its output, or a head in the target's
engine."""
SOURCES = (DRAFT, *GUESSERS)
"""All names, including the draft engine."""


class Guessers:
    """The guessers of one orchestrator, and their breakers. Creates a panel for each session."""

    def __init__(
        self,
        index: CorpusIndex | None = None,
        grammars: Grammars | None = None,
        histories: Histories | None = None,
    ) -> None:
        self._index = index
        self._grammars = grammars
        self._histories = histories if histories is not None else Histories()
        self._breakers = {source: Breaker(source) for source in GUESSERS}

    @classmethod
    def open(cls, config: SpeculationConfig, tokenizer: Tokenizer, grammars: Grammars | None = None) -> Guessers:
        """Open the guessers of a service. Raises: ConfigError if one of them is not available."""
        check_sources(config)
        path = config.retrieval_index
        index = CorpusIndex.open(Path(path), tokenizer.vocabulary_hash) if path is not None else None
        return cls(index, grammars, Histories(config.suffix_history_tokens, config.suffix_history_callers))

    def panel(
        self,
        sources: Iterable[str],
        config: SpeculationConfig,
        max_depth: int,
        precision: SourcePrecision,
        vocab_size: int,
        output: OutputForm = UNCONSTRAINED,
        *,
        has_head: bool = False,
    ) -> Panel:
        """Create one session's panel; `max_depth` limits its guesses. `has_head`: whether the target has a head."""
        forms = output.forms if self._grammars is not None else {}
        possible = {*BY_TEXT, *forms, *((HEAD,) if has_head else ())}
        wanted = dict.fromkeys((*sources, *({"template"} & forms.keys())))
        names = [name for name in wanted if name in possible and max_depth > 0 and self._breakers[name].admits()]
        forced = {name: self._forced(name, form) for name, form in forms.items() if name in names}
        inputs = GuesserInputs(
            config,
            max_depth,
            self._index,
            prompt_len=output.prompt_len,
            forced=forced,
            vocab_size=vocab_size,
            history=self._histories.of(output.isolation) if "suffix" in names else None,
        )
        return Panel({name: GUESSERS[name](inputs) for name in names}, self._breakers, precision, vocab_size)

    def _forced(self, name: str, form: Grammar) -> ForcedTokens:
        """Start compiling a grammar, and return its forced tokens."""
        assert self._grammars is not None, "where there are none no output has a form"
        return self._grammars.forced(form, is_binding=name == "grammar")


def available_sources(config: SpeculationConfig) -> tuple[str, ...]:
    """Return the guesser names that requests may use with these settings."""
    return tuple(name for name in SOURCES if name not in NEED_INDEX or config.retrieval_index is not None)


def check_sources(config: SpeculationConfig) -> None:
    """Validate the configured guessers.

    Raises: ConfigError, which names the first unknown or unavailable guesser.
    """
    names = available_sources(config)
    for index, name in enumerate(config.guessers):
        if name in NEED_INDEX and name not in names:
            raise ConfigError(f"speculation.guessers[{index}] needs speculation.retrieval_index, of `outrider index`")
        if name not in names:
            raise ConfigError(f"speculation.guessers[{index}] must be one of {', '.join(names)}, got {name!r}")
