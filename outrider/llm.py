"""`LLM`: generate completions for batches of prompts in this process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config import ServiceConfig
from core.errors import ConfigError, InvalidRequest
from core.records import Chunk, EngineStats, GenerationRequest
from deploy.api import streamed, to_requests
from deploy.checkpoints import check_directory
from deploy.defaults import decide, detect_facts
from deploy.settings import service_config
from deploy.sources import Setting
from outrider.outputs import RequestOutput, to_output
from outrider.params import Prompt, SamplingParams, checked

if TYPE_CHECKING:
    from outrider.running import Running  # imports torch

logger = logging.getLogger(__name__)

Chat = Sequence[Mapping[str, str]]
PROMPT_FIELDS = ("prompt", "text", "token_ids", "chat")
RENAMED = {"beams": "beam_width", "source_token_ids.ids": "source"}
"""Arguments of fields that are not named as in `SamplingParams`."""


class LLM:
    """A target and an optional draft, loaded in this process until `close` or the end of the `with` block.

    All prompts of a call share the engines' steps (continuous batching), at most limits.max_sessions at a time.
    Thread-safe.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        config: ServiceConfig | str | Path | None = None,
        settings: Mapping[str, object] | None = None,
        progress: bool = True,
    ) -> None:
        """Load and warm up the models.

        `target` and `draft` are checkpoint directories. Without them and without `config`, the demo pair is loaded.
        `config` is a settings file, as for `outrider serve`. `settings` override it by dotted name, for example
        {"target.engine.dtype": "bfloat16"}. `progress` shows a progress bar in a terminal. Raises: StartupError.
        """
        self._config = _config(target, draft, config, settings or {})
        self._has_bar = progress
        from outrider.running import Running  # imports torch

        self._running: Running = Running(self._config, logger.info)
        self._finalizer = weakref.finalize(self, self._running.close)  # also runs when the interpreter exits

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running requests and free the engines; may be called twice."""
        self._finalizer()

    @property
    def config(self) -> ServiceConfig:
        """All settings in effect."""
        return self._config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Return one result per prompt, in order; a prompt is text or a list of token ids.

        `params` is one value for all prompts or a sequence with one per prompt. Its fields may also be passed as
        keyword arguments, for example `max_tokens=40`. Nothing runs unless every prompt is valid. Raises:
        InvalidRequest naming the argument; OutriderError.
        """
        several = [prompts] if _is_one_prompt(prompts) else list(prompts)
        return self._outputs(several, _params_of(several, params, fields), is_chat=False)

    def chat(
        self,
        chats: Chat | Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, for chats: lists of messages with `role` and `content`, rendered by the model's template."""
        is_one = bool(chats) and isinstance(chats[0], Mapping)
        several: list[Any] = [chats] if is_one else list(chats)
        return self._outputs(several, _params_of(several, params, fields), is_chat=True)

    def stats(self) -> Mapping[str, EngineStats]:
        """Steps, rows and memory of each engine, by role."""
        found: Mapping[str, EngineStats] = self._open.stats()
        return found

    @property
    def _open(self) -> Running:
        if not self._finalizer.alive:
            raise ConfigError("this LLM is closed; make another")
        return self._running

    def _outputs(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], *, is_chat: bool
    ) -> list[RequestOutput]:
        running, now = self._open, self._open.clock.now()
        samples = [
            self._requests(index, prompt, each, now, is_chat=is_chat)
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        flat = [request for requests in samples for request in streamed(requests)]
        with _bar(len(flat), is_shown=self._has_bar) as done:
            streams = iter(running.complete(flat, done))
        return [_gathered(prompt, requests, streams) for prompt, requests in zip(prompts, samples, strict=True)]

    def _requests(
        self, index: int, prompt: Any, params: SamplingParams, now: float, *, is_chat: bool
    ) -> list[GenerationRequest]:
        """One request for each of `n` outputs. Raises: InvalidRequest naming the argument."""
        try:
            served = self._running.served.with_adapter(params.adapter)
            requests = to_requests(params.given(prompt, is_chat=is_chat), served, now)
        except InvalidRequest as error:
            raise _named(error, index) from None
        return [replace(request, request_id=f"prompt-{index}") for request in requests]


def _gathered(prompt: Any, requests: Sequence[GenerationRequest], streams: Iterator[Any]) -> RequestOutput:
    chunks: list[list[Chunk]] = [[] for _ in requests]
    for index, stream in enumerate([next(streams) for _ in streamed(requests)]):
        for chunk in stream:
            chunks[index + chunk.output].append(chunk)
    outputs = tuple(to_output(index, *each) for index, each in enumerate(zip(requests, chunks, strict=True)))
    return RequestOutput(prompt, requests[0].prompt, outputs, chunks[0][0].prompt_logprobs)


def _config(
    target: str | Path | None,
    draft: str | Path | None,
    config: ServiceConfig | str | Path | None,
    settings: Mapping[str, object],
) -> ServiceConfig:
    """Raises: ConfigError naming the argument."""
    if isinstance(config, ServiceConfig):
        if target is not None or draft is not None or settings:
            raise ConfigError("config: a ServiceConfig is complete; give no target, draft or settings beside it")
        return config
    if draft is not None and target is None and config is None:
        raise ConfigError("draft: give its target, too")
    given = [Setting(name, value, f"settings[{name!r}]") for name, value in settings.items()]
    for role, path in (("target", target), ("draft", draft)):
        if path is not None:
            check_directory(role, Path(path))
            given.append(Setting(f"{role}.engine.model", str(Path(path).resolve()), role))
    if target is not None and config is None:  # do not use the demo pair's settings
        name = Path(target).resolve().name
        implied = [Setting("target.engine.deterministic", False, "target"), Setting("model_name", name, "target")]
        facts = detect_facts(Path(target), Path(draft) if draft is not None else None)
        plain = [Setting("draft", None, "draft")] if draft is None else []
        given = [*implied, *plain, *decide(facts)[0], *given]
    return service_config(Path(config) if config is not None else None, given)


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))


def _params_of(prompts: Sequence[Any], params: Any, fields: Mapping[str, Any]) -> Sequence[SamplingParams]:
    if params is not None and fields:
        raise InvalidRequest(next(iter(fields)), "cannot be given beside params: put it there")
    if params is None or isinstance(params, SamplingParams):
        return [params if params is not None else checked(fields)] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequest("params", f"must be one, or one for each of {len(prompts)} prompts, got {len(params)}")
    return list(params)


def _named(error: InvalidRequest, index: int) -> InvalidRequest:
    """Rename the error's field to the argument's name: the API groups its fields, SamplingParams does not."""
    head, _, rest = error.field.partition(".")
    if head.partition("[")[0] in PROMPT_FIELDS:
        return InvalidRequest(f"prompts[{index}]", error.problem)
    name = RENAMED.get(error.field.partition("[")[0], rest or head)
    return InvalidRequest(name, f"{error.problem} (prompts[{index}])")


@contextmanager
def _bar(num_requests: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; the yielded function takes the number of tokens of each completed output."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    rate = TextColumn("{task.fields[tokens]} tokens")
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        rate,
    )
    with Progress(
        *columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)
    ) as progress:
        task, total = progress.add_task("", total=num_requests, tokens=0), 0

        def done(num_tokens: int) -> None:
            nonlocal total
            total += num_tokens
            progress.update(task, advance=1, tokens=total)

        yield done
