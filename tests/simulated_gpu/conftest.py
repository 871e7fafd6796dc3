"""The simulated GPU for a test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.simulated_gpu.device import SimulatedGPU
from tests.simulated_gpu.patches import simulated_gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimulatedGPU]:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler here")
    with simulated_gpu() as gpu:
        yield gpu
