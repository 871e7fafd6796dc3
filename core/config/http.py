"""Settings of the HTTP API: how a model's text is parsed, what keeps a stream alive, and whether `/` shows a page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.config.checks import Settings, check

CALL_FORMATS = ("hermes", "llama3_json", "mistral")
REASONING_FORMATS = ("think", "mistral")
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class HttpConfig(Settings):
    """How the HTTP API parses a model's text, and what it shows."""

    tool_call_parser: str = AUTO
    """Format of the model's tool calls: hermes (`<tool_call>` around a JSON object, as Hermes and Qwen write),
    llama3_json (a JSON object with `name` and `parameters`), mistral (`[TOOL_CALLS]`), auto (derived from the chat
    template) or none (requests with tools are refused). Set it where auto does not recognise the template."""
    reasoning_parser: str = AUTO
    """Format of the model's reasoning before its answer: think (`<think>`), mistral (`[THINK]`), auto (derived from the
    chat template) or none (reasoning stays in the text). Set it where auto does not recognise the template."""

    keep_alive_s: float = 15.0
    """Seconds, at least 0, of silence after which a stream gets a comment, so that nothing between server and client
    takes it for dead while a request is queued or a long prompt is read; 0 sends none. After the first comment an
    error comes as an event, since the status has been sent. Keep it below the idle timeout of your load balancer."""
    load_adapters: bool = False
    """Whether callers may load and unload LoRA adapters while the model is served, by `/v1/load_lora_adapter` and
    `/v1/unload_lora_adapter`; without it both are 404. A caller names a directory of the targets' nodes, which is then
    read: set it only where every caller is trusted."""
    page: bool = True
    """Whether `/` serves a web page with a playground and live figures; without it `/` is 404. In a fleet the first
    model's setting decides. Unset it where the HTTP port is public."""

    def __post_init__(self) -> None:
        for name, formats in (("tool_call_parser", CALL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
            allowed = (AUTO, NONE, *formats)
            check(getattr(self, name) in allowed, name, f"one of {', '.join(allowed)}", getattr(self, name))
        is_time = math.isfinite(self.keep_alive_s) and self.keep_alive_s >= 0
        check(is_time, "keep_alive_s", "finite and at least 0", self.keep_alive_s)
