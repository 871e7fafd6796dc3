"""Versions of a draft's checkpoint, one of which a symbolic link names: the one that is served.

Knows directories; must not know models. Draft replicas follow the link by themselves (`draft.follows_link`), so the
process that switches it needs no access to the service.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from core.errors import ConfigError

NUM_KEPT = 3
"""Number of versions on disk: the served one, the one before, and one more."""


class Versions:
    """The link, and the directory of the versions that are made here: 0001, 0002, ..."""

    def __init__(self, link: Path, directory: Path) -> None:
        """Raises: ConfigError."""
        if not link.is_symlink() or not link.is_dir():
            raise ConfigError(
                f"--draft: {link} must be a symbolic link to a checkpoint: ln -s CHECKPOINT {link}; "
                "name it as draft.engine.model, with draft.follows_link: true"
            )
        self._link, self._directory = link, directory
        for option, folder in (("--versions", directory), ("--draft", link.parent)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise ConfigError(f"{option}: {folder} cannot be written: {error}") from error
        self.state = directory / "judged.json"
        """File with the state of the version that is being judged, for a new process."""

    @property
    def served(self) -> Path:
        return self._link.resolve()

    def add(self, write: Callable[[Path], None]) -> Path:
        """A new version, written as a whole or not at all. Raises: OSError."""
        numbers = [int(each.name) for each in self._made()]
        folder = self._directory / f"{max(numbers, default=0) + 1:04d}"
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            write(partial)
            partial.rename(folder)
        except BaseException:  # a full disk is a SafetensorError
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return folder

    def serve(self, version: Path) -> None:
        """Switch the link, so that it always names a whole version. Raises: OSError."""
        new = self._link.with_name(f".{self._link.name}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(version.resolve())
        os.replace(new, self._link)  # noqa: PTH105  `rename` would say less

    def drop(self, version: Path) -> None:
        shutil.rmtree(version, ignore_errors=True)

    def drop_old(self) -> None:
        """Delete all but the newest versions and the served one."""
        for each in self._made()[:-NUM_KEPT]:
            if each.resolve() != self.served:
                self.drop(each)

    def _made(self) -> list[Path]:
        return sorted(each for each in self._directory.iterdir() if each.name.isdigit())
