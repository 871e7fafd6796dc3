"""The ways to run a forward pass, one file each. `docs/howto/add-a-backend.md` says how to add one."""

from workers.runtime.backend import Backend
from workers.runtime.backends.compiled_cpu import CompiledBackend
from workers.runtime.backends.compiled_layers import CompiledLayersBackend
from workers.runtime.backends.cuda_graph import CudaGraphBackend
from workers.runtime.backends.eager import EagerBackend
from workers.runtime.backends.packed_cpu import PackedBackend
from workers.runtime.backends.program_cpu import ProgramBackend
from workers.runtime.backends.traced_cpu import TracedBackend

BACKENDS: tuple[type[Backend], ...] = (
    CudaGraphBackend,
    CompiledLayersBackend,
    ProgramBackend,
    CompiledBackend,
    TracedBackend,
    PackedBackend,
    EagerBackend,
)
"""Fastest first. A runtime uses those that support its settings, down to the first that runs every step."""
