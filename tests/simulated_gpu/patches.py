"""cuda:0 in a process without a GPU, with what the project and torch ask of one."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from core import noise
from tests.simulated_gpu.device import HOST, SimulatedGPU
from tests.workers.attention.kernels import PlainKernel
from workers.model.shards import reading
from workers.noise import gumbel
from workers.noise.noise_self_test import find_noise_kernel
from workers.runtime.backends import cuda_graph


@functools.cache
def add_guard() -> None:
    """Have torch know the device, for as long as this process runs."""
    source, home = Path(__file__).with_name("guard.cpp"), Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC"]
        where = [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
        subprocess.run([*compiler, str(source), "-o", str(library), *where], check=True)
        torch.ops.load_library(str(library))


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGPU]:
    """Within the `with` block, engines on "cuda" run on the simulated device."""
    add_guard()
    gpu = SimulatedGPU()
    with pytest.MonkeyPatch.context() as patches:
        for target, name, value in _replaced(gpu):
            patches.setattr(target, name, value)
        for name, module in _triton(gpu).items():
            patches.setitem(sys.modules, name, module)
        with gpu:
            yield gpu
        find_noise_kernel.cache_clear()


def _replaced(gpu: SimulatedGPU) -> Iterator[tuple[Any, str, Any]]:
    generator = torch.Generator
    yield torch.cuda, "_lazy_init", lambda: None
    yield torch.cuda, "mem_get_info", lambda _: (1 << 28, 1 << 30)
    yield torch.cuda, "get_device_name", lambda _: "simulated"
    yield torch.cuda, "get_device_capability", lambda _: (9, 0)
    yield torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, synchronize=lambda: None)
    yield torch.cuda, "current_stream", lambda _: None
    yield torch, "Generator", lambda _=HOST: generator(HOST)
    yield torch, "compile", lambda code, **_: _as_compiled(code)
    yield torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True
    yield Tensor, "pin_memory", lambda tensor: gpu.pin(tensor)
    yield reading, "ThreadPoolExecutor", lambda *_: nullcontext(SimpleNamespace(map=map))  # the device has one thread
    yield reading, "BUFFER_BYTES", 1 << 16  # the device keeps what was pinned
    yield cuda_graph, "CudaRecorder", lambda _: gpu.record
    yield gumbel, "_NOISE", gumbel.NoiseCache(1 << 26)


def _as_compiled(code: Callable[..., Any]) -> Callable[..., Any]:
    """The code as it is, told that it is being compiled."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.compiler, "is_dynamo_compiling", lambda: True):
            return code(*args, **kwargs)

    return run


def _triton(gpu: SimulatedGPU) -> dict[str, Any]:
    """The modules of Triton kernels, each kernel by plain code on the host."""

    class Kernel:
        def __init__(self, **_: Any) -> None:
            self._plain = PlainKernel()

        def store(self, *args: Any) -> None:
            gpu.launch("store", self._plain.store, *args)

        def attend(self, *args: Any) -> Tensor:
            return gpu.launch("attend", self._plain.attend, *args)

    def rows(keys: Tensor, vocab_size: int) -> Tensor:
        return torch.from_numpy(noise.gumbel_rows([tuple(key) for key in keys.tolist()], vocab_size))

    def launching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: gpu.launch(name, function, *args)

    return {
        "workers.attention.triton_attention": SimpleNamespace(TritonKernel=Kernel),
        "workers.products.triton_product": SimpleNamespace(product=launching("product", F.linear)),
        "workers.noise.triton_noise": SimpleNamespace(gumbel_rows=launching("noise", rows)),
    }
