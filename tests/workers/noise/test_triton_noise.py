"""The Triton kernel has the bits of `core.noise`: compiled on a GPU, elsewhere in Triton's interpreter.

The interpreter computes with numpy and so cannot tell what a compiler would make of the kernel; the compiler needs no
GPU, and its code is looked at, too. Each runs in a process of its own, since Triton reads its settings once.
"""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from core import noise

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="Triton is not installed: it comes with torch for CUDA; `pip install --no-deps triton` is enough here",
    ),
]

SIZES = (1, 3, 4, 4_095, 4_096, 4_097, 50_001)
NUM_KEYS = 8
SEED = 2026

ROWS = """
import sys
import numpy
import torch
from workers.noise.triton_noise import gumbel_rows

folder, device, *sizes = sys.argv[1:]
keys = torch.from_numpy(numpy.load(f"{folder}/keys.npy")).to(device)
for size in sizes:
    numpy.save(f"{folder}/{size}.npy", gumbel_rows(keys, int(size)).cpu().numpy())
"""

CODE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workers.noise import triton_noise

types = {"keys": "*i64", "numbers": "*fp32", "vocab_size": "i32", "num_blocks": "constexpr"}
source = ASTSource(triton_noise._fill, types, {"num_blocks": triton_noise.BLOCKS})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=triton_noise.LAUNCH).asm["ptx"])
"""


def run(code, *arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def random_keys():
    """The first two have the ends of all ranges."""
    random = np.random.default_rng(SEED)
    ranges = (-(2**63), 2**63), (0, 2**32), (0, 2**22), (0, 6)
    keys = np.stack([random.integers(*ends, NUM_KEYS) for ends in ranges], axis=1)
    keys[:2] = [(-1, 2**32 - 1, 2**32 - 1, 5), (-(2**63), 2**31, 0, 0)]
    return keys


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Noise of the same keys for each size."""
    folder = tmp_path_factory.mktemp("noise")
    np.save(folder / "keys.npy", random_keys())
    if torch.cuda.is_available():
        run(ROWS, folder, "cuda", *SIZES, TRITON_CACHE_DIR=str(folder))
    else:
        run(ROWS, folder, "cpu", *SIZES, TRITON_INTERPRET="1")
    return {size: np.load(folder / f"{size}.npy") for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_has_the_bits_of_the_reference(found, size):
    expected = noise.gumbel_rows(random_keys(), size)
    assert (found[size].shape, found[size].dtype) == ((NUM_KEYS, size), np.float32)
    assert np.array_equal(found[size].view(np.int32), np.ascontiguousarray(expected).view(np.int32))


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    return run(CODE, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("compiled")))


def test_compiled_operations_are_rounded_one_by_one(ptx):
    """Without `.rn` an addition after a multiplication may become a fused one when the machine code is made."""
    operations = set(re.findall(r"\b(?:add|sub|mul|div|fma|mad|rcp)[.\w]*f64\b", ptx))
    assert operations == {"add.rn.f64", "mul.rn.f64", "div.rn.f64"}


def test_compiled_constants_are_those_of_the_reference(ptx):
    """Triton takes a Python number for float32 in some operations: too seldom visible to be found by comparing rows."""
    constants = {struct.unpack(">d", bytes.fromhex(digits))[0] for digits in re.findall(r"\b0d([0-9A-F]{16})\b", ptx)}
    needed = {0.5, 2.0**-32, noise.SQRT_HALF, noise.LN_2, *noise.ATANH_SERIES}
    assert constants - {-1.0, 2.0} == needed
