"""`outrider index`: build an index of a corpus for the guesser "retrieval"."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from core.errors import CheckpointError, ConfigError
from deploy.cli.terminal import progress, say


@dataclass(frozen=True)
class IndexOptions:
    """Build an index of a corpus for the guesser "retrieval"; the setting `speculation.retrieval_index` names its file.

    The corpus is a text file or a directory of text files. The index works only with models that have this tokenizer.
    """

    corpus: Annotated[Path, Argument(metavar="CORPUS", help="A file of text in UTF-8, or a directory of such files.")]
    tokenizer: Annotated[
        Path, Option(metavar="DIR", help="Checkpoint of the target, or another one with its tokenizer.")
    ]
    out: Annotated[Path, Option(metavar="FILE", help="Where to write the index.")]
    glob: Annotated[str, Option(metavar="PATTERN", help="Which files of the directory to read.")] = "**/*"


def index(options: IndexOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    from orchestrator.guessers import (  # numpy and tokenizers, which most commands do not need
        NUM_PASSES,
        encode_index,
        write_index,
    )
    from orchestrator.text import Tokenizer

    try:
        tokenizer = Tokenizer.from_directory(options.tokenizer)
    except CheckpointError as error:
        raise ConfigError(f"--tokenizer: {error}") from error
    files = list(_files(options))
    with progress("reading", len(files)) as saw_file:
        documents = []
        for file in files:
            documents.append(tokenizer.encode(_text(file), add_special_tokens=False))
            saw_file()
    vocabulary = tokenizer.vocabulary_hash
    with progress("sorting", NUM_PASSES) as observe_pass:
        try:
            header, body = encode_index(
                filter(None, documents),
                vocab_size=tokenizer.vocab_size,
                vocabulary=vocabulary,
                observe_pass=observe_pass,
            )
            write_index(header, body, options.out)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{options.out} cannot be made of {options.corpus}: {error}") from error
    sys.stdout.write(f"{options.out}: {header.num_tokens:,} tokens of {len(files)} files\n")
    return 0


def _files(options: IndexOptions) -> Iterator[Path]:
    """The files of the corpus. Raises: ConfigError if there are none."""
    corpus = options.corpus
    files = sorted(path for path in corpus.glob(options.glob) if path.is_file()) if corpus.is_dir() else [corpus]
    if not files or not files[0].is_file():
        raise ConfigError(f"there is no file of text at {corpus}")
    yield from files


def _text(file: Path) -> str:
    """The text of a file. For a file that cannot be read as UTF-8: an empty text, and a message on standard error."""
    try:
        return file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        say(f"skipped {file}: {error}")
        return ""
