"""Grammars of outputs: compiles and caches them, and computes which tokens they allow next.

Knows llguidance; must not know torch, models or sessions.
"""

from workers.grammar.cache import Grammars
from workers.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarProblem, Mask
from workers.grammar.forced import ForcedTokens
from workers.grammar.state import GrammarState
from workers.grammar.structure import FIELD, STRUCTURES, TEMPLATE_FIELD, Structure, grammar_of, template_of

__all__ = [
    "FIELD",
    "STRUCTURES",
    "TEMPLATE_FIELD",
    "CompiledGrammar",
    "ForcedTokens",
    "GrammarCompiler",
    "GrammarProblem",
    "GrammarState",
    "Grammars",
    "Mask",
    "Structure",
    "grammar_of",
    "template_of",
]
