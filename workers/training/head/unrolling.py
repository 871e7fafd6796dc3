"""An EAGLE-3 head's own unrolled steps over packed texts (training-time test)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.training.head.eagle3 import Eagle3
from workers.training.head.teaching import Teacher
from workers.training.packing import PackedTexts


def unrolled(head: Eagle3, teacher: Teacher, one: PackedTexts, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`Steps` of a head: its normed outputs at each row, by step, and the rows of the target's output layer."""
    device = teacher.output.device
    features = one.states[None, :, : -teacher.output.shape[1]].to(device)
    embedded = [teacher.embeddings[torch.roll(one.token_ids, -1 - step)][None].to(device) for step in range(num_steps)]
    with torch.autocast(device.type, torch.bfloat16, enabled=teacher.output.dtype == torch.bfloat16):
        for states in head.unrolled(
            features.to(teacher.output.dtype),
            embedded,
            one.positions[None].to(device),
            one.mask()[None, None].to(device),
        ):
            yield head.normed(states[0]), teacher.output
