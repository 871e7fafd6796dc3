"""The buffer of texts to learn from: files of one directory, of a bounded size, the oldest of which are deleted.

Knows files; must not know models. A file has a text a line, in the form that `outrider train-head --data` reads, too.
Several targets may write to one directory.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from core.config import EngineConfig
from core.errors import ConfigError

logger = logging.getLogger(__name__)

SUFFIX = ".jsonl"
NAME = re.compile(r"\d{20}-[0-9a-f]{16}-\d+\.jsonl")
STALE_S = 60.0
"""Age in seconds at which a half-written file has no writer any more."""
NUM_FILES = 32
"""Number of files of a full buffer: what is deleted at once is its share."""
MAX_FILE_TOKENS = 16_384
MAX_WAITING = 1024
"""Number of texts that may wait for the disk. Further ones are lost."""
WRITE_PERIOD_S = 10.0
"""Longest time in seconds from the end of a text to its file."""


@dataclass(frozen=True, slots=True)
class KeptText:
    """A part of one session's text, with the places where no guess was right."""

    token_ids: list[int]
    first: int
    """Index of the first token that the target chose while this part was kept; those before are context."""
    missed: list[int]
    """Indices of the tokens that no guess had."""
    top_ids: list[list[int]]
    """The target's likeliest tokens at each of these places."""
    top_logprobs: list[list[float]]
    """Their log probabilities by the raw model, without temperature and masks."""
    num_accepted: int = 0
    """Number of guesses that were accepted."""
    num_rejected: int = 0
    """Number of missed places that had a guess."""
    temperature: float = 0.0

    @property
    def num_chosen(self) -> int:
        """Number of tokens that the target chose."""
        return len(self.token_ids) - self.first

    def only(self, indices: Sequence[int]) -> KeptText:
        """The text with these of its missed places."""
        return replace(
            self,
            missed=[self.missed[index] for index in indices],
            top_ids=[self.top_ids[index] for index in indices],
            top_logprobs=[self.top_logprobs[index] for index in indices],
        )

    def line(self) -> str:
        fields = {
            "kind": "live",
            "temperature": self.temperature,
            "token_ids": self.token_ids,
            "spans": [[self.first, len(self.token_ids)]],
            "missed": self.missed,
            "top_ids": self.top_ids,
            "top_logprobs": [[round(each, 4) for each in row] for row in self.top_logprobs],
            "accepted": self.num_accepted,
            "rejected": self.num_rejected,
        }
        return json.dumps(fields, separators=(",", ":")) + "\n"

    @classmethod
    def of(cls, given: dict[str, Any]) -> KeptText:
        ((first, _),) = given["spans"]
        tops = given["top_ids"], given["top_logprobs"]
        counts = given["accepted"], given["rejected"], given["temperature"]
        return cls(given["token_ids"], first, given["missed"], *tops, *counts)


def check_buffer(directory: Path) -> None:
    """Make the directory if it is missing. Raises: ConfigError unless files can be written to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_stale(directory)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"target.engine.learning_buffer: {directory} cannot be written: {error}") from error


class LearningBuffer:
    """Writes texts on a thread of its own. `add` never waits and never raises."""

    def __init__(self, directory: Path, max_tokens: int, epoch: int) -> None:
        """`epoch` tells the files of one target from those of another. Raises: ConfigError."""
        self._directory, self._max_tokens, self._epoch = directory, max_tokens, epoch
        self._file_tokens = min(MAX_FILE_TOKENS, max_tokens // NUM_FILES)
        check_buffer(directory)
        self.num_kept = 0
        """Number of tokens that the target chose and that are on disk."""
        self.num_lost = 0
        """Number of those that could not be written, or came faster than the disk takes them."""
        self._problem = ""
        self._waiting: queue.Queue[KeptText | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="learning-buffer", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: EngineConfig, epoch: int) -> LearningBuffer | None:
        """The buffer of an engine; None unless its settings have one. Raises: ConfigError."""
        if config.learning_buffer is None:
            return None
        return cls(Path(config.learning_buffer).expanduser(), config.learning_buffer_tokens, epoch)

    def add(self, text: KeptText) -> None:
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._lose([text], "its disk is too slow")

    def close(self) -> None:
        """Write what has been added, and end the thread."""
        self._waiting.put(None)
        self._thread.join()

    # On the thread

    def _run(self) -> None:
        is_over = False
        while not is_over:
            texts, is_over = self._next_texts()
            if texts:
                self._write(texts)

    def _next_texts(self) -> tuple[list[KeptText], bool]:
        """The texts of the next file, and whether they are the last."""
        texts: list[KeptText] = []
        num_tokens = 0
        end_s: float | None = None
        while num_tokens < self._file_tokens:
            try:
                text = self._waiting.get(timeout=None if end_s is None else max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                return texts, False
            if text is None:
                return texts, True
            texts.append(text)
            num_tokens += len(text.token_ids)
            end_s = time.monotonic() + WRITE_PERIOD_S if end_s is None else end_s
        return texts, False

    def _write(self, texts: list[KeptText]) -> None:
        num_tokens = sum(len(text.token_ids) for text in texts)
        file = self._directory / f"{time.time_ns():020d}-{self._epoch:016x}-{num_tokens}{SUFFIX}"
        partial = file.with_suffix(".partial")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:  # noqa: PTH123  a mode
                out.writelines(text.line() for text in texts)
            partial.rename(file)
            self._delete_oldest()
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self._lose(texts, str(error))
            return
        self.num_kept += sum(text.num_chosen for text in texts)
        self._problem = ""

    def _delete_oldest(self) -> None:
        left = self._max_tokens
        for file in reversed(files_after(self._directory)):
            left -= _tokens_of(file)
            if left < 0:
                file.unlink(missing_ok=True)

    def _lose(self, texts: list[KeptText], problem: str) -> None:
        self.num_lost += sum(text.num_chosen for text in texts)
        if problem != self._problem:
            self._problem = problem
            logger.warning("nothing is kept to learn from in %s: %s; serving goes on", self._directory, problem)


def files_after(directory: Path, name: str = "") -> list[Path]:
    """The files written after the one with this name, oldest first."""
    return sorted(file for file in directory.glob(f"*{SUFFIX}") if file.name > name and NAME.fullmatch(file.name))


def read_kept(files: Iterable[Path]) -> list[KeptText]:
    """The texts of these files. What a target has deleted meanwhile, or is no text, is left out."""
    found: list[KeptText] = []
    for file in files:
        with suppress(FileNotFoundError):
            try:
                for line in file.read_text(encoding="utf-8").splitlines():
                    found.append(KeptText.of(json.loads(line)))
            except FileNotFoundError:
                raise
            except OSError as error:
                logger.warning("%s cannot be read: %s", file, error)
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s has a line that is no text to learn from: %r", file, error)
    return found


def _delete_stale(directory: Path) -> None:
    """Delete what killed writers left; other targets may be writing to the directory."""
    for file in directory.glob("*.partial"):
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > STALE_S:
                file.unlink()


def _tokens_of(file: Path) -> int:
    """Number of tokens in a file, from its name."""
    number = file.stem.rpartition("-")[2]
    return int(number) if number.isdigit() else 0
