"""Texts of a made-up target, in which each token follows from the one before."""

from __future__ import annotations

import math
import random

from workers.live import KeptText

TOP = (0.9, 0.08, 0.02)


def follower(token):
    """The target's token after a token."""
    return (7 * token + 3) % 250


def text_of(first, size=24, *, accepted=0, rejected=0):
    """A prompt of four tokens and what follows; every other place was missed."""
    tokens = [first]
    while len(tokens) < size:
        tokens.append(follower(tokens[-1]))
    missed = list(range(4, size, 2))
    top_ids = [[tokens[place], (tokens[place] + 1) % 250, (tokens[place] + 2) % 250] for place in missed]
    logprobs = [[math.log(prob) for prob in TOP] for _ in missed]
    return KeptText(tokens, 4, missed, top_ids, logprobs, accepted, rejected)


def texts(number, seed=0, **counts):
    order = random.Random(seed)
    return [text_of(order.randrange(250), **counts) for _ in range(number)]
