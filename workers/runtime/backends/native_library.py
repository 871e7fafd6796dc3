"""Compiles the forward pass ahead of time into native libraries, which call Python for attention and packed products.

Python between operators takes more than half of a small model's step, and a third of a 100M model's. torch.export
traces the model's code once, and AOTInductor compiles the trace (adr/cpu-runtime). There are two libraries, for one row
and for any larger number, so that nothing is compiled once an engine serves. They are kept on disk without weights,
under a name that depends on everything they were made from. Their code is executed, so no other user may be able to
write to that folder.

Knows models and compilers. Must not know what the rows stand for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import Any, Final, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

from core.errors import first_line
from workers.attention import latent, seam
from workers.runtime import backend, features
from workers.runtime.backend import BackendUnavailable, LogitsModule
from workers.runtime.backends import operators, packed_weights
from workers.runtime.features import tap_of

logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""A library's only function: [ids, positions, wanted rows] -> [logits]."""

_MODULES = (backend, features, latent, operators, packed_weights, seam)
SOURCES: Final = (__file__, *(str(module.__file__) for module in _MODULES))
"""Source files that a library depends on. After a change of any of them, libraries are compiled again."""
ONE_ROW, MORE_ROWS = "one row", "more rows"
EXAMPLES: Final = {ONE_ROW: 1, MORE_ROWS: 8}
"""Number of rows of the example that each library is compiled from."""
MAX_ROWS: Final = 1 << 20
LIBRARY: Final = re.compile(r"[0-9a-f]{32}-(one-row|more-rows)\.pt2")
UNUSED_S: Final = 60 * 86_400
"""A library is deleted after this time without use: each change of model, machine or torch leaves two behind."""
OPTIONS: Final[dict[str, Any]] = {
    "aot_inductor.package_constants_in_so": False,
    "compile_threads": 1,  # in this process: a pool of processes would outlive the start
    "always_keep_tensor_constants": True,  # otherwise small weights become constants of the code
    "joint_graph_constant_folding": False,  # otherwise values computed from weights do, too
    "emulate_precision_casts": True,  # fused kernels round to bfloat16 where the model does
}


def weights_of(model: Any) -> dict[str, Tensor]:
    """The weights by their names in a library. Libraries only point to them, so the caller must keep them."""
    module = LogitsModule(model)
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in tensors}


def build(
    model: Any, weights: Mapping[str, Tensor], folder: Path, least_rows: int, progress: Callable[[str], None]
) -> dict[str, Run]:
    """Load the libraries for steps of `least_rows` rows and more: those of an earlier start, or newly compiled ones.

    Raises: BackendUnavailable.
    """
    _make_private(folder)
    name = _name_of(model)
    files = {
        rows: folder / f"{name}-{rows.replace(' ', '-')}.pt2"
        for rows, example in EXAMPLES.items()
        if example >= least_rows
    }
    libraries = _load_earlier(files, weights)
    if libraries is not None:
        progress(f"compiled before, in {folder}")
    else:
        for rows, file in files.items():
            _compile_for(rows, model, file, progress)
    _tidy(folder, [*files.values()])
    return libraries or _load_all(files, weights)


def _load_earlier(files: Mapping[str, Path], weights: Mapping[str, Tensor]) -> dict[str, Run] | None:
    """The libraries of an earlier start; None if one is missing or cannot be loaded."""
    if not all(file.exists() for file in files.values()):
        return None
    try:
        return _load_all(files, weights)
    except BackendUnavailable as error:
        logger.warning("the compiled code in compile_cache cannot be used: %s", error)
        return None


def _load_all(files: Mapping[str, Path], weights: Mapping[str, Tensor]) -> dict[str, Run]:
    return {rows: _load(file, weights) for rows, file in files.items()}


def _compile_for(rows: str, model: Any, file: Path, progress: Callable[[str], None]) -> None:
    progress(f"compiling for {rows} at a time, which is done once: the result is kept in {file.parent}")
    began_s = monotonic()
    _compile(LogitsModule(model).eval(), EXAMPLES[rows], file)
    progress(f"compiled in {monotonic() - began_s:.0f} s")


def _tidy(folder: Path, used: Collection[Path]) -> None:
    """Delete libraries that no start has used for UNUSED_S. Keeps other files, and libraries in a read-only folder."""
    for file in folder.glob("*.pt2"):
        if LIBRARY.fullmatch(file.name):
            with suppress(OSError):
                if file in used:
                    file.touch()
                elif file.stat().st_mtime < time() - UNUSED_S:
                    file.unlink()


def _make_private(folder: Path) -> None:
    """Make the folder. Its files are executed, so no other user may own it or be able to write to it.

    Raises: BackendUnavailable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        raise BackendUnavailable(f"compile_cache cannot be written: {error}") from error
    if found.st_uid not in (0, os.getuid()):
        raise BackendUnavailable(
            f"{folder} is another user's, and its files would be executed; set compile_cache to a folder of this user"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        writer = "everybody" if found.st_mode & stat.S_IWOTH else "its group"
        raise BackendUnavailable(
            f"{writer} can write to {folder}, and its files would be executed; restrict it to this user"
        )


def _compile(module: nn.Module, num_rows: int, file: Path) -> None:
    # Fewer wanted rows than rows: the exporter takes equal sizes for the same symbol.
    example = (torch.zeros(num_rows, dtype=torch.long), torch.arange(num_rows), torch.arange((num_rows + 1) // 2))
    dynamic = None if num_rows == 1 else ({0: Dim.DYNAMIC},) * 3
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about its own code
            program = torch.export.export(module, example, dynamic_shapes=dynamic)
            _check_ranges(program)
            with tempfile.TemporaryDirectory(dir=file.parent) as aside:  # the file appears whole or not at all
                made = torch._inductor.aoti_compile_and_package(
                    program, package_path=str(Path(aside) / file.name), inductor_configs=dict(OPTIONS)
                )
                Path(made).replace(file)
    except BackendUnavailable:
        raise
    except Exception as error:  # torch raises many kinds: for code that it cannot trace, or without a compiler
        raise BackendUnavailable(first_line(error)) from error


def _check_ranges(program: torch.export.ExportedProgram) -> None:
    """Check that the code is valid for any number of rows, because a library does not check its inputs.

    Raises: BackendUnavailable.
    """
    for rows in program.range_constraints.values():
        if rows.lower > 2 or rows.upper < MAX_ROWS:
            raise BackendUnavailable(f"its code is wrong above {rows.upper} rows, or below {rows.lower}")


def _load(file: Path, weights: Mapping[str, Tensor]) -> Run:
    """Raises: BackendUnavailable."""
    try:
        library = torch._inductor.aoti_load_package(str(file), run_single_threaded=True)
        names = library.get_constant_fqns()
        if foreign := sorted(set(names) - weights.keys()):
            raise BackendUnavailable(f"its code makes tensors of its own: {', '.join(foreign)}")
        used = {name: weights[name] for name in names}
        library.load_constants(used, check_full_update=True, user_managed=True)
    except RuntimeError as error:
        raise BackendUnavailable(f"{file}: {first_line(error)}") from error
    run: Run = library.loader.boxed_run  # skips the pytrees around the tensors
    return run


def _name_of(model: Any) -> str:
    """A name that depends on everything the code depends on."""
    digest = hashlib.sha256(_shape_of(model).encode())
    for file in SOURCES:
        digest.update(Path(file).read_bytes())
    products = [(product.shape, product.has_bias) for product in packed_weights.packed(model)]
    tap = tap_of(model)
    layers = tap.layers if tap is not None else ()
    parts = (type(model).__name__, model.dtype, products, layers, torch.get_num_threads(), _machine())
    digest.update(repr(parts).encode())
    return digest.hexdigest()[:32]


def _shape_of(model: Any) -> str:
    """The model's config, without its path."""
    settings = model.config.to_dict()
    settings.pop("_name_or_path", None)
    return json.dumps(settings, sort_keys=True, default=str)


def _machine() -> tuple[str, ...]:
    """Features of the CPU, and versions of torch and transformers."""
    flags = Path("/proc/cpuinfo")
    features = (
        next((line for line in flags.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
        if flags.exists()
        else ""
    )
    return (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability(), features)
