"""A user's own prompts, from a file.

Knows text files; must not know tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from core.errors import ConfigError


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; in a file whose name ends in .jsonl a JSON string, or an object with a string "prompt".

    Raises: ConfigError, which names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error}") from error
    is_json = path.suffix == ".jsonl"
    given = [(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [_from_json(line, where) if is_json else line for line, where in given]
    if not prompts:
        raise ConfigError(f"--prompts: {path} has no prompt")
    return prompts


def _from_json(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompts: {where} is not JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'--prompts: {where} must be a JSON string or an object with a string "prompt"')
    return prompt
