"""Conversion between text and token ids."""

from orchestrator.text.detokenize import IncrementalDetokenizer
from orchestrator.text.tokenizer import Tokenizer
