"""`outrider convert`: make a checkpoint with float weights from a GGUF file or a quantized checkpoint."""

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
    """Make a checkpoint with float weights from a GGUF file or a quantized checkpoint; nothing is left out.

    A source with anything that the checkpoint would lack, such as an unknown tensor, is refused.
    """

    source: Annotated[
        Path, Argument(metavar="SOURCE", help="A GGUF file with a whole model, or a directory with quantized weights.")
    ]
    out: Annotated[Path, Argument(metavar="DIR", help="Directory to write; must not exist.")]
    dtype: Annotated[Dtype, Option(help="Type of the weights that are written.")] = "bfloat16"


def convert(options: ConvertOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    from deploy.checkpoints import check_models
    from workers.model.conversion import convert_gguf, write_dequantized  # imports torch; engines do not need it

    out = options.out
    check_folders(out)
    if out.exists():
        raise ConfigError(f"{out} exists; give a directory that does not")
    if not options.source.exists():
        raise ConfigError(f"there is no file or directory {options.source}")
    write = write_dequantized if options.source.is_dir() else convert_gguf
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        path = Path(folder) / out.name
        write(options.source, path, options.dtype, say)
        try:
            check_models(EngineConfig(str(path), dtype=options.dtype), {}, "DIR")
        except StartupError as error:
            raise ConfigError(f"the checkpoint made from {options.source} cannot be served: {error}") from error
        path.rename(out)
    sys.stdout.write(f"{out}: serve it with outrider serve --target {out} --dtype {options.dtype}\n")
    return 0
