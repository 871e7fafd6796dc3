"""Settings of the HTTP API: how a model's text is read, and whether there is a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from core.config.checks import check, forbid_unknown

CALL_FORMATS = ("hermes", "llama3_json", "mistral")
REASONING_FORMATS = ("think", "mistral")
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """What the HTTP API takes out of a model's text, and what it shows."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    tool_call_parser: str = AUTO
    """How the model writes calls of tools: hermes (`<tool_call>` around a JSON object, as Hermes and Qwen do),
    llama3_json (a JSON object with `name` and `parameters`), mistral (`[TOOL_CALLS]`), auto (what the chat template
    shows) or none. Name one where the template does not show it; none refuses tools."""
    reasoning_parser: str = AUTO
    """How the model marks what it thinks before it answers: think (`<think>`), mistral (`[THINK]`), auto (what the
    chat template shows) or none. None leaves all in the text."""

    page: bool = True
    """Whether `/` shows a page for people: a playground, and live figures. False gives 404 there. Of a fleet the first
    model's counts."""

    def __post_init__(self) -> None:
        for name, formats in (("tool_call_parser", CALL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
            allowed = (AUTO, NONE, *formats)
            check(getattr(self, name) in allowed, name, f"one of {', '.join(allowed)}", getattr(self, name))
