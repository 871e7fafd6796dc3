"""Rounds in coupled mode along texts that the target has drawn, with the engines' own draws and verdicts.

The target's output does not depend on the guesses, so one text is the output with any drafter. A guess counts only if
all guesses before it are right, and then they are the text's tokens. So one pass over a text gives the guesses of the
rounds that start at each of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from core.records import Sampling
from core.speculation import TokenTree
from workers.sampling import Row, process
from workers.sampling.coupled import verify
from workers.sampling.sampler import drawn
from workers.step import Readback, Uploads

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and the target's output."""

    token_ids: list[int]
    logits: Tensor
    """From which each token of the output was drawn.  # [output, V]"""
    sampling: Sampling

    @property
    def num_prompt(self) -> int:
        return len(self.token_ids) - len(self.logits)

    def anchors(self, num_guesses: int) -> Tensor:
        """Last tokens whose features are known, by round: the token after them is known, and a block and its bonus
        token follow."""
        return torch.arange(self.num_prompt - 1, len(self.token_ids) - num_guesses - 2)

    def rows(self, places: Iterable[int], *, reads_noise: bool = True) -> list[Row]:
        """How the tokens at these places are drawn; by the largest logit alone if the noise is not read."""
        sampling = self.sampling if reads_noise else replace(self.sampling, temperature=0.0)
        return [Row(sampling, place, (), self.num_prompt) for place in places]


def draw(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    """The token of each row.  # [R, V]"""
    readback = Readback()
    ids = drawn(process(scores, rows), rows, readback)
    readback.wait()
    return ids()


@torch.inference_mode()
def draw_texts(target: Any, prompts: Tensor, num_tokens: int, temperature: float) -> list[TargetText]:
    """The target's output after each prompt, by coupled sampling with a seed of its own.  # prompts [B, L]"""
    num_prompts, size = prompts.shape
    samplings = [Sampling(temperature=temperature, seed=seed) for seed in range(num_prompts)]
    output = target(input_ids=prompts, use_cache=True, logits_to_keep=1)
    tokens, kept = [prompts], list[Tensor]()
    for place in range(size, size + num_tokens):
        kept.append(output.logits[:, -1].float())
        chosen = draw(kept[-1], [Row(sampling, place, (), size) for sampling in samplings])
        tokens.append(torch.tensor(chosen)[:, None])
        output = target(input_ids=tokens[-1], past_key_values=output.past_key_values, use_cache=True)
    texts, logits = torch.cat(tokens, 1).tolist(), torch.stack(kept, 1)
    return [TargetText(*each) for each in zip(texts, logits, samplings, strict=True)]


def guesses_of(text: TargetText, scores: Tensor, *, reads_noise: bool) -> list[list[int]]:
    """The chain of each anchor's round. Guess j is drawn with the noise of its place.  # scores [A, K, V]"""
    num = scores.shape[1]
    places = (int(anchor) + 2 + depth for anchor in text.anchors(num) for depth in range(num))
    drawn_ids = draw(scores.flatten(0, 1), text.rows(places, reads_noise=reads_noise))
    return [drawn_ids[first : first + num] for first in range(0, len(drawn_ids), num)]


def accepted_lengths(text: TargetText, guesses: Sequence[Sequence[int]]) -> list[int]:
    """Number of guesses that the coupled rule accepts in each anchor's round."""
    num = len(guesses[0])
    places = [int(anchor) + 2 + depth for anchor in text.anchors(num) for depth in range(num + 1)]
    rows, logits = text.rows(places), text.logits[torch.tensor(places) - text.num_prompt]
    uploads, readback = Uploads(CPU), Readback()
    decide = verify([TokenTree.chain(chain) for chain in guesses], rows, logits.shape[1], uploads)
    uploads.send()
    outcomes = decide(process(logits, rows), readback)
    readback.wait()
    lengths = []
    for anchor, outcome in zip(text.anchors(num).tolist(), outcomes(), strict=True):
        assert list(outcome.samples) == text.token_ids[anchor + 2 : anchor + 3 + num], "not the draws of the text"
        lengths.append(len(outcome.path))
    return lengths


def tokens_a_round(accepted: Sequence[Sequence[int]], length: int, num_free: int = 0) -> float:
    """Mean over rounds with chains of this length. `accepted`: by text and anchor; `num_free`: tokens of a round that
    are neither guesses nor the verdict's own."""
    tokens = rounds = 0
    for of_text in accepted:
        place = 0
        while place < len(of_text):
            gained = min(of_text[place], length) + 1 + num_free
            tokens, rounds, place = tokens + gained, rounds + 1, place + gained
    return tokens / rounds
