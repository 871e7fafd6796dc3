"""Sends values to a device at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from core.noise import Key
from core.speculation import TokenTree
from workers.sampling import draft_candidates, verify
from workers.sampling.batched import Outcomes
from workers.sampling.logits import Row
from workers.step import Readback, Uploads


def verified(
    rule: str, blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback
) -> Outcomes:
    """The outcomes of `verify.verify`, after the readback."""
    uploads = Uploads(log_p.device)
    decide = verify.verify(rule, blocks, rows, log_p.shape[1], uploads)
    uploads.send()
    return decide(log_p, readback)


def drawn_guesses(probs: Tensor, ids: Tensor, keys: Sequence[Key], readback: Readback, **kinds: Any) -> Any:
    """The draws of `draft_candidates.draw_guesses`, after the readback."""
    uploads = Uploads(probs.device)
    draw = draft_candidates.draw_guesses(keys, uploads, **kinds)
    uploads.send()
    return draw(probs, ids, readback)
