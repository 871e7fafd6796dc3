"""A linear layer of its own, for model code that is not run as a program."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.native import machine
from workers.native.matrix import Matrix
from workers.native.ranks.shared import ALONE
from workers.native.team import Team
from workers.native.vectors import PANEL

_NONE = np.zeros(1, np.int64)
_NO_ROWS = np.zeros((1, 5), np.int64)


class NativeProduct:
    """The forward of a linear layer, with its weights in panels."""

    def __init__(self, matrix: Matrix, team: Team) -> None:
        self.matrix, self._team = matrix, team
        self._stages = np.array([[machine.PRODUCTS, 0, 1, 0]], np.int64)

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` times the weight, plus the bias.  # [..., in] -> [..., out]"""
        matrix, team = self.matrix, self._team
        num_rows, width = rows.numel() // matrix.num_inputs, matrix.num_panels * PANEL
        memory = np.empty(num_rows * (matrix.num_inputs + width), np.float32)
        numbers = torch.from_numpy(memory)
        numbers[: rows.numel()] = rows.reshape(-1)
        sizes = [matrix.kind, 0, matrix.num_inputs, matrix.num_inputs, width]
        codes = np.array([[*sizes, *matrix.code, int(rows.dtype == torch.bfloat16)]], np.int64)
        counts = np.array([num_rows, 0, 0, 0], np.int64)
        shorts = torch.empty(team.num_threads, num_rows * matrix.padded_inputs, dtype=torch.int16)

        def work(thread: int) -> None:
            machine.run(
                thread, team.num_threads, team.counter.ctypes.data, self._stages, codes, memory,
                memory.ctypes.data, counts, _NONE, _NONE, _NONE, _NONE, _NO_ROWS, _NONE, _NONE, _NONE,
                np.zeros(1, np.float32), shorts[thread].data_ptr(), ALONE.numbers, ALONE.state,
            )  # fmt: skip

        team.run(work)
        outputs = numbers[num_rows * matrix.num_inputs :].view(num_rows, width)[:, : matrix.num_outputs]
        return outputs.to(rows.dtype).reshape(*rows.shape[:-1], matrix.num_outputs)
