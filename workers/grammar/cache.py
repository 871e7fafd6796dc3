"""Compiled grammars of one engine or orchestrator: caches those used last, and compiles new ones in a thread."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from core.config import EngineConfig, ServiceConfig
from core.records import Grammar, ModelInfo
from workers.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarProblem
from workers.grammar.forced import ForcedTokens
from workers.grammar.state import GrammarState

logger = logging.getLogger(__name__)


class Grammars:
    """Cache of compiled grammars. Each is compiled once, in one thread. Thread-safe."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], vocab_size: int, max_kept: int) -> None:
        self._make_compiler = make_compiler
        self._vocab_size = vocab_size
        self._max_kept = max_kept
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @classmethod
    def of_engine(cls, config: EngineConfig, model: ModelInfo) -> Grammars:
        """Grammars for the outputs of this model."""
        size = model.vocab_size
        compiler = partial(GrammarCompiler.of_model, config.model, size, model.eos_token_ids)
        return cls(compiler, size, config.max_grammars)

    @classmethod
    def of_service(cls, config: ServiceConfig, target: ModelInfo) -> Grammars | None:
        """Grammars for guessing outputs in the orchestrator; None if no grammars are served.

        Prepares them at once: reading the tokenizer of a large vocabulary blocks the process for seconds.
        """
        if config.limits.max_grammar_bytes == 0:
            return None
        grammars = cls.of_engine(config.target.engine, target)
        grammars.prepare()
        return grammars

    def prepare(self) -> None:
        """Read the tokenizer, so that no request waits for it. With an unusable tokenizer, every grammar is refused."""
        try:
            self._ready_compiler()
        except GrammarProblem as problem:
            logger.warning("structured output is not served: %s", problem)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile in the calling thread, or take from the cache. Raises: GrammarProblem."""
        if (compiled := self._find(grammar)) is None:
            compiled = self._ready_compiler().compile(grammar)
            with self._lock:
                self._kept[grammar] = compiled
                self._kept.move_to_end(grammar)
                while len(self._kept) > self._max_kept:
                    self._kept.popitem(last=False)
        return compiled

    def state(self, grammar: Grammar | None, held: GrammarState | None) -> GrammarState | None:
        """State of a sequence with this grammar: `held` if it has the same grammar, otherwise a new one."""
        if grammar is None or (held is not None and held.grammar == grammar):
            return None if grammar is None else held
        return GrammarState(grammar, lambda: self._compiled(grammar), self._vocab_size)

    def forced(self, grammar: Grammar, *, is_binding: bool = True) -> ForcedTokens:
        """A guesser's view of one output with this grammar."""
        return ForcedTokens(self._compiled(grammar), is_binding=is_binding)

    def _compiled(self, grammar: Grammar) -> Future[CompiledGrammar]:
        if (compiled := self._find(grammar)) is None:
            return self._thread.submit(self.compile, grammar)
        done: Future[CompiledGrammar] = Future()
        done.set_result(compiled)
        return done

    def _find(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._kept.get(grammar)
            if compiled is None or compiled.is_exhausted:
                return None
            self._kept.move_to_end(grammar)
            return compiled

    def _ready_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = self._make_compiler()
        return self._compiler

    def close(self) -> None:
        """Compile nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
