"""`outrider train-head`: heads for a target, from texts.

Knows options and files; `workers.heads` fits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from core.config import Dtype, EngineConfig
from core.errors import ConfigError
from core.ranges import Range
from deploy.cli.options import check_folders, number, read_prompts
from deploy.cli.terminal import progress

TEXT_TOKENS = 512
"""Length of the pieces that texts are cut into, in tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainHeadOptions:
    """Make heads that draft for a target from its hidden states (docs/howto/draft-with-a-head.md).

    Blockwise heads are fitted in closed form: one pass of the target over the texts, which should be like its outputs.
    """

    target: Annotated[Path, Option(metavar="DIR", help="Checkpoint of the target.")]
    data: Annotated[
        list[Path], Option(metavar="FILE", help="Texts; several times for several files. A .jsonl file has one a line.")
    ]
    out: Annotated[Path, Argument(metavar="OUT", help="Directory to write; must not exist.")]
    kind: Annotated[Literal["blockwise"], Option(help="Kind of head.")] = "blockwise"
    heads: Annotated[int, number(Range(1, 16, is_whole=True), "Number of heads: the depth of their guesses")] = 3
    tokens: Annotated[int, number(Range(TEXT_TOKENS, 10**9, is_whole=True), "Tokens of the texts to use at most")] = (
        200_000
    )
    dtype: Annotated[Dtype, Option(help="Type of weights and arithmetic of the target.")] = "float32"
    device: Annotated[str, Option(metavar="DEVICE", help="Device, as torch names it: cpu, cuda, cuda:0.")] = "cpu"
    threads: Annotated[int, number(Range(1, 1024, is_whole=True), "CPU threads of a pass")] = 1


def train_head(options: TrainHeadOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    check_folders(options.out)
    if options.out.exists():
        raise ConfigError(f"{options.out} exists; give a directory that does not")
    texts = [text for path in options.data for text in _read(path)]
    import torch

    from deploy.checkpoints import check_directory
    from workers.heads import fit_heads

    check_directory("--target", options.target)
    torch.set_num_threads(options.threads)
    pieces = _pieces(texts, options)
    config = EngineConfig(str(options.target), dtype=options.dtype, device=options.device, num_threads=options.threads)
    with progress("reading texts", len(pieces)) as step_done:
        found = fit_heads(config, pieces, options.heads, step_done)
    found.write(options.out)
    agreement = ", ".join(f"{share:.2f}" for share in found.agreement)
    sys.stdout.write(
        f"{options.out}: {options.heads} heads fitted on {found.num_tokens} tokens; on held-out text their first "
        f"guesses are the target's own token in {agreement} of all places\n"
        f"at the target: outrider serve --target {options.target} --target.engine.head {options.out}\n"
    )
    return 0


def _read(path: Path) -> list[str]:
    """Raises: ConfigError."""
    if path.suffix == ".jsonl":
        return read_prompts(path)
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data: {path} cannot be read: {error}") from error


def _pieces(texts: Sequence[str], options: TrainHeadOptions) -> list[tuple[int, ...]]:
    """The texts' tokens in pieces. Raises: ConfigError, CheckpointError."""
    from orchestrator.text import Tokenizer

    tokenizer = Tokenizer.from_directory(options.target)
    pieces: list[tuple[int, ...]] = []
    for text in texts:
        ids = tuple(tokenizer.encode(text))
        pieces += [ids[start : start + TEXT_TOKENS] for start in range(0, len(ids), TEXT_TOKENS)]
    pieces = [piece for piece in pieces if len(piece) > options.heads][: options.tokens // TEXT_TOKENS]
    if len(pieces) < 2:
        raise ConfigError(
            f"--data: the texts have too few tokens; at least two pieces of {options.heads + 1} are needed"
        )
    return pieces
