"""Documents as one tensor of tokens, and the windows that training steps read from it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from models.train.architecture import END_OF_TEXT_ID


def token_stream(tokenizer: Any, texts: Iterable[str]) -> Tensor:
    """Concatenate all documents, each preceded by the end-of-text token.  # [N]"""
    ids: list[int] = []
    for text in texts:
        ids.append(END_OF_TEXT_ID)
        ids.extend(tokenizer(text, verbose=False)["input_ids"])
    return torch.tensor(ids, dtype=torch.int32)  # [N]


def training_windows(stream: Tensor, length: int, rows: int, step: int, seed: int) -> Tensor:
    """The windows of one step [rows, length]. They depend only on the step, so a resumed run reads the same windows.

    Each epoch cuts the stream at a new offset and reads every window once, in a new order.
    """
    steps_per_epoch = max(1, (len(stream) - length) // (length * rows))
    epoch, place = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    offset = int(torch.randint(length, (1,), generator=generator))
    order = torch.randperm(steps_per_epoch * rows, generator=generator)
    starts = offset + order[place * rows : (place + 1) * rows] * length
    return windows_at(stream, starts, length)


def windows_at(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """Windows of `length` tokens from the given starts, as 64-bit ids.  # [rows, length]"""
    return stream[(starts[:, None] + torch.arange(length)).clamp(max=len(stream) - 1)].long()  # [rows, length]
