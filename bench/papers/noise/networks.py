"""Networks that guess a block in one pass: a small model with a bigram bias, and look-ahead tokens of the target.

An anchor p is the last token of which the target's features are known. The token at p + 1 is known, too. Row j of the
anchor's block stands at position p + 1 + j and guesses the token at p + 2 + j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from bench.papers.noise.rounds import draw
from workers.sampling import Row
from workers.training.head.eagle3 import NUM_FEATURES
from workers.training.packing import PackedTexts

Scores = Callable[[PackedTexts, Tensor, int], Tensor]
"""Logits of the first K guesses of each anchor, given that the guesses before are the text's tokens.  # [A, K, V]"""


class BlockDrafter(nn.Module):
    """Guesses x_k = argmax_x l_k(x) + B(x_(k-1), x) + G_k(x), where one pass gives l of all guesses.

    Context rows are the target's features of three layers. The first row of a block is the token after the anchor, the
    others are masks; rows of a block see each other. B has a low rank. Layers begin as the target's last.
    Source: DFlash (arXiv 2602.06036) and DSpark's Markov head; G is the noise of coupled mode, where they sample.
    """

    def __init__(self, target: Any, num_guesses: int, rank: int, num_layers: int = 2) -> None:
        """`rank`: of B; 0 for none."""
        super().__init__()
        self._body = like_the_last_layers(target, num_layers)
        self._embeddings, self._output = embeddings_of(target)
        vocab_size, hidden = self._output.shape
        self._fuse = nn.Linear(NUM_FEATURES * hidden, hidden, bias=False)
        eye = torch.eye(hidden)
        self._fuse.weight.data = torch.cat([torch.zeros_like(eye), torch.zeros_like(eye), eye], -1)
        self._masks = like_a_mean_token(self._embeddings, num_guesses - 1)
        self._before = nn.Embedding(vocab_size, rank) if rank else None
        self._after = nn.Embedding(vocab_size, rank) if rank else None
        if self._after is not None:
            nn.init.zeros_(self._after.weight)

    def scores(self, one: PackedTexts, anchors: Tensor, num: int) -> Tensor:
        """`Scores` of this network."""
        before = one.token_ids[anchors[:, None] + 1 + torch.arange(num)]
        return self._logits(one, anchors, num) + self._bias(before)

    @torch.inference_mode()
    def guess(self, one: PackedTexts, anchor: int, rows: Sequence[Row]) -> list[int]:
        """The chain of one round, each guess after this network's own before it. `rows`: how each is drawn."""
        guesses = [int(one.token_ids[anchor + 1])]
        for logits, row in zip(self._logits(one, torch.tensor([anchor]), len(rows))[0], rows, strict=True):
            guesses += draw(logits[None] + self._bias(torch.tensor(guesses[-1:])), [row])
        return guesses[1:]

    def weights(self) -> int:
        """Number of weights that a pass reads."""
        looked_up = [self._masks, *([self._before] if self._before is not None else [])]
        own = sum(each.numel() for each in self.parameters()) - sum(each.weight.numel() for each in looked_up)
        return own + self._output.numel()

    def _logits(self, one: PackedTexts, anchors: Tensor, num: int) -> Tensor:
        """l.  # [A, K, V]"""
        context = self._fuse(one.states[:, : self._fuse.in_features].float())
        first = self._embeddings[one.token_ids[anchors + 1]][:, None]
        blocks = torch.cat([first, self._masks.weight[: num - 1].expand(len(anchors), -1, -1)], 1)
        return block_states(self._body, context, blocks, one, anchors, is_causal=False) @ self._output.T

    def _bias(self, before: Tensor) -> Tensor:
        """B after these tokens.  # [...] -> [..., V]"""
        if self._before is None or self._after is None:
            return torch.zeros(())
        bias: Tensor = self._before(before) @ self._after.weight.T
        return bias


class LookAhead(nn.Module):
    """PaSS: trained embeddings after the anchor, whose rows in the target's own pass guess. They see neither the token
    after the anchor nor what other rows guess. Source: Monea et al. 2023 (arXiv 2311.13581)."""

    def __init__(self, target: Any, num_guesses: int) -> None:
        super().__init__()
        self._embeddings, self._output = embeddings_of(target)
        self._look_ahead = like_a_mean_token(self._embeddings, num_guesses)
        self._states = partial(block_states, target.base_model, is_causal=True)

    def scores(self, one: PackedTexts, anchors: Tensor, num: int) -> Tensor:
        """`Scores` of these tokens."""
        blocks = self._look_ahead.weight[:num].expand(len(anchors), -1, -1)
        return self._states(self._embeddings[one.token_ids], blocks, one, anchors) @ self._output.T


class OneLayer(nn.Module):
    """A separate draft: a causal model of the target's last layer, with the target's embeddings and output layer. It
    reads tokens alone, so in a round it guesses as it does along a text."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._body = like_the_last_layers(target, 1)
        self._embeddings, self._output = embeddings_of(target)

    def scores(self, one: PackedTexts, anchors: Tensor, num: int) -> Tensor:
        """`Scores` of this model."""
        rows = self._embeddings[one.token_ids]
        states = self._body(
            inputs_embeds=rows[None],
            attention_mask=one.mask()[None, None],
            position_ids=one.positions[None],
            use_cache=False,
        ).last_hidden_state[0]
        logits: Tensor = states[anchors[:, None] + 1 + torch.arange(num)] @ self._output.T
        return logits

    def weights(self) -> int:
        """Number of weights that a pass reads."""
        return sum(each.numel() for each in self.parameters()) + self._output.numel()


def like_the_last_layers(target: Any, num_layers: int) -> Any:
    """A model of this many layers, which begin as the target's last, without embeddings: rows are given as vectors."""
    config = deepcopy(target.config)
    config.num_hidden_layers = num_layers
    body = AutoModel.from_config(config, dtype=torch.float32)
    own = (*body.layers, body.norm)
    for layer, first in zip(own, (*target.base_model.layers[-num_layers:], target.base_model.norm), strict=True):
        layer.load_state_dict(first.state_dict())
    body.embed_tokens = None
    return body


def embeddings_of(target: Any) -> tuple[Tensor, Tensor]:
    """The target's embeddings, and its output layer.  # [V, hidden] each"""
    return target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()


def like_a_mean_token(embeddings: Tensor, num: int) -> nn.Embedding:
    """Embeddings that begin as the mean of all tokens', with a token's length."""
    mean = embeddings.mean(0, keepdim=True)
    found = nn.Embedding(num, embeddings.shape[1])
    found.weight.data = (mean / mean.norm() * embeddings.norm(dim=-1).mean()).repeat(num, 1)
    return found


def block_states(
    body: Any, context: Tensor, blocks: Tensor, one: PackedTexts, anchors: Tensor, *, is_causal: bool
) -> Tensor:
    """States of each anchor's block, in one pass.  # context [S, hidden], blocks [A, K, hidden] -> [A, K, hidden]"""
    positions, mask = block_rows(one, anchors, blocks.shape[1], is_causal=is_causal)
    rows = torch.cat([context, blocks.flatten(0, 1)])
    output = body(
        inputs_embeds=rows[None], attention_mask=mask[None, None], position_ids=positions[None], use_cache=False
    )
    states: Tensor = output.last_hidden_state[0, len(context) :]
    return states.view_as(blocks)


def block_rows(one: PackedTexts, anchors: Tensor, num: int, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Positions of a text's rows and then of each anchor's block, and what is added to their scores of each other.

    A block sees the text up to its anchor, and itself.  # [S + A K], [S + A K, S + A K]
    """
    size, own = len(one.token_ids), anchors.repeat_interleave(num)
    depths = torch.arange(num).repeat(len(anchors))
    sees = own[:, None] == own[None]
    if is_causal:
        sees &= depths[:, None] >= depths[None]
    of_text = one.mask()
    mask = torch.full((size + len(own), size + len(own)), float("-inf"))
    mask[:size, :size], mask[size:, :size] = of_text, of_text[own]
    mask[size:, size:] = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))
    return torch.cat([one.positions, one.positions[own] + 1 + depths]), mask
