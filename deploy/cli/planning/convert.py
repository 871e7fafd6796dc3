"""`outrider convert`: make a checkpoint that can be served from a GGUF file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from typer import Argument, Option

from core.config import Dtype, EngineConfig
from core.errors import ConfigError, StartupError
from deploy.cli.options import check_folders
from deploy.cli.terminal import say


@dataclass(frozen=True)
class ConvertOptions:
    """Make a checkpoint that can be served from a GGUF file: weights are dequantized, and nothing is left out.

    A file with anything that the checkpoint would lack, such as an unknown tensor, is refused.
    """

    file: Annotated[Path, Argument(metavar="FILE", help="A GGUF file with a whole model.")]
    out: Annotated[Path, Argument(metavar="DIR", help="Directory to write; must not exist.")]
    dtype: Annotated[Dtype, Option(help="Type of the weights that are written.")] = "bfloat16"


def convert(options: ConvertOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    from deploy.checkpoints import check_models
    from workers.model.gguf import convert_gguf  # imports torch; not in the package, because engines do not need it

    out = options.out
    check_folders(out)
    if out.exists():
        raise ConfigError(f"{out} exists; give a directory that does not")
    if not options.file.is_file():
        raise ConfigError(f"there is no file {options.file}")
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        path = Path(folder) / out.name
        convert_gguf(options.file, path, options.dtype, say)
        try:
            check_models(EngineConfig(str(path), dtype=options.dtype), {}, "DIR")
        except StartupError as error:
            raise ConfigError(f"the checkpoint made from {options.file} cannot be served: {error}") from error
        path.rename(out)
    sys.stdout.write(f"{out}: serve it with outrider serve --target {out} --dtype {options.dtype}\n")
    return 0
