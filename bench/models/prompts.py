"""Prompts of real code that neither model of the demo pair was trained on: pieces of held-out files."""

from __future__ import annotations

import random

from models.train.corpus import load_split

PROMPT_CHARS = 400


def held_out_prompts(num_prompts: int, seed: int = 0) -> list[str]:
    """Random pieces by `seed`, each beginning at a line. The files are those of this interpreter."""
    documents = [document for document in load_split().held_out if len(document.text) > 2 * PROMPT_CHARS]
    chooser = random.Random(seed)
    return [_piece(chooser.choice(documents).text, chooser) for _ in range(num_prompts)]


def _piece(text: str, chooser: random.Random) -> str:
    place = chooser.randrange(len(text) - PROMPT_CHARS)
    start = text.rfind("\n", 0, place) + 1
    return text[start : start + PROMPT_CHARS]
