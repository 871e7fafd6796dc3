"""The checkpoint of an engine, where a symbolic link may name it and be switched while the service runs.

Knows paths; must not know engines or Serve.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from core.config import EngineConfig


class FollowedCheckpoint:
    """The checkpoint that an engine's next process loads, and whether the engine should be restarted for it."""

    def __init__(self, model: str, *, follows_link: bool) -> None:
        """`model`: directory of the checkpoint, or a link to it."""
        self._model, self._follows = model, follows_link
        self._served = ""
        """The checkpoint of the engine that has loaded last."""
        self._left: str | None = None
        """A checkpoint that could not be loaded, until the link names another."""

    def settings(self, config: EngineConfig) -> EngineConfig:
        """These settings with the link's checkpoint, or with the last one if that could not be loaded."""
        named = self._named()
        is_left = named == self._left and self._served
        return replace(config, model=self._served if is_left else named) if self._follows else config

    def has_loaded(self, config: EngineConfig) -> None:
        self._served = config.model

    def is_served(self, config: EngineConfig) -> bool:
        """Whether the last engine that loaded had the checkpoint of these settings."""
        return config.model == self._served

    def has_failed(self, config: EngineConfig) -> None:
        self._left = config.model

    @property
    def has_moved(self) -> bool:
        """Whether the link names another checkpoint than the engine serves."""
        named = self._named()
        if named != self._left:
            self._left = None
        return self._follows and named not in (self._served, self._left)

    def _named(self) -> str:
        return str(Path(self._model).resolve()) if self._follows else self._model
