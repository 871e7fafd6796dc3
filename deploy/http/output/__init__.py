"""Splits a model's text into reasoning, answer and tool calls while it grows.

Knows marks and JSON; must not know which API asks.
"""

from deploy.http.output.blocks import Block, BlockChange, Blocks, Change
from deploy.http.output.grammar import grammar_of_calls, has_marks
from deploy.http.output.pieces import Kind, OutputPiece, calls_of, joined, new_call_id
from deploy.http.output.splitter import Reading, Splitter, calls_format, has_begun, reasoning_format

__all__ = [
    "Block",
    "BlockChange",
    "Blocks",
    "Change",
    "Kind",
    "OutputPiece",
    "Reading",
    "Splitter",
    "calls_format",
    "calls_of",
    "grammar_of_calls",
    "has_begun",
    "has_marks",
    "joined",
    "new_call_id",
    "reasoning_format",
]
