"""Prompts of real code that neither model of the demo pair has seen: pieces of the held-out files."""

from __future__ import annotations

import random

from models.train.corpus import load_split

PROMPT_CHARS = 400


def held_out_prompts(num_prompts: int, seed: int = 0) -> list[str]:
    """Pieces from places drawn by `seed`, each beginning with a line; the files are those of this interpreter."""
    documents = [document for document in load_split().held_out if len(document.text) > 2 * PROMPT_CHARS]
    chooser = random.Random(seed)
    return [_piece(chooser.choice(documents).text, chooser) for _ in range(num_prompts)]


def _piece(text: str, chooser: random.Random) -> str:
    place = chooser.randrange(len(text) - PROMPT_CHARS)
    start = text.rfind("\n", 0, place) + 1
    return text[start : start + PROMPT_CHARS]
