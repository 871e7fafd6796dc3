"""The commands run in a work folder, so that the card can list them exactly."""

import json
import shlex
from pathlib import Path
from typing import Any


def record(work: Path, arguments: list[str], seconds: float) -> None:
    """Append one command. The work folder's path is shown as "work"."""
    shown = ["work" if Path(argument) == work else argument for argument in arguments]
    line = {"command": "python -m models.train " + shlex.join(shown), "seconds": round(seconds, 1)}
    with history_path(work).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def write_history(work: Path, history: list[dict[str, Any]]) -> None:
    """Start with the commands of an earlier work folder."""
    history_path(work).write_text("".join(json.dumps(line) + "\n" for line in history), encoding="utf-8")


def read_history(work: Path) -> list[dict[str, Any]]:
    """All commands, oldest first."""
    return [json.loads(line) for line in history_path(work).read_text(encoding="utf-8").splitlines()]


def history_path(work: Path) -> Path:
    return work / "history.jsonl"
