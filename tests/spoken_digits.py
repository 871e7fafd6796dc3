"""A tiny T5 pair that has learned something: it spells the digits that it reads, "407" as "four zero seven".

Trained in less than a minute on one core, so that no weights need to be kept: `train` is deterministic but for the
last bits of the machine's arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from tests.checkpoints import EOS, VOCAB_SIZE, tokenizer_json

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BATCH, MAX_DIGITS = 32, 5
IGNORED = -100
"""A label that costs nothing."""


@cache
def _tokenizer() -> Any:
    return Tokenizer.from_str(tokenizer_json())


def ids_of(text: str) -> list[int]:
    found: list[int] = _tokenizer().encode(text).ids
    return found


def spelled(digits: str) -> str:
    return " ".join(WORDS[int(digit)] for digit in digits)


def some_digits(dice: random.Random) -> str:
    return "".join(dice.choice("0123456789") for _ in range(dice.randint(2, MAX_DIGITS)))


def train(path: Path, num_layers: int, width: int, num_steps: int) -> Path:
    """Write the checkpoint of a T5 of this size, trained for so many steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSeq2SeqLM.from_config(_config(num_layers, width)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, num_steps, pct_start=0.1)
        dice = random.Random(0)
        for _ in range(num_steps):
            sources, labels = zip(*(_example(dice) for _ in range(BATCH)), strict=True)
            ids = _padded(sources, 0)
            optimizer.zero_grad()
            model(input_ids=ids, attention_mask=(ids != 0).long(), labels=_padded(labels, IGNORED)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval().save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json())
    return path


def _config(num_layers: int, width: int) -> Any:
    return AutoConfig.for_model(
        "t5",
        vocab_size=VOCAB_SIZE,
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        num_heads=4,
        dropout_rate=0.0,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        eos_token_id=EOS,
        pad_token_id=0,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )


def _example(dice: random.Random) -> tuple[list[int], list[int]]:
    digits = some_digits(dice)
    return ids_of(digits), [*ids_of(spelled(digits)), EOS]


def _padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
