"""The models that one orchestrator serves over gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from core.config import ServiceConfig
from core.errors import UnknownModel
from core.records import EngineStats, ModelInfo, Sampling
from deploy import calls
from deploy.api.proxy_admission import Places
from deploy.metrics import Meters, RequestMeter
from deploy.metrics.load import Load, kv_share
from orchestrator.service import Service
from orchestrator.text import Tokenizer

if TYPE_CHECKING:
    from deploy.spans.tracing import RequestSpans, Tracing

MAX_ID_BYTES = 5
"""Most bytes of a token id on the wire. A message may hold a full context of ids twice: as prompt and as output to
resume."""
DECIDED_BY_QUEUE = 32
"""Number of completions that proxies admit beyond sessions and queue. The orchestrator's queue, which knows priorities
and callers, decides which are refused. `deploy.app` allows for them in Serve's limit of ongoing requests."""
OTHER_FIELDS_BYTES = 256 * 1024
"""Generous bound in bytes on stop strings, biases, chat roles and other fields."""


@dataclass(frozen=True, slots=True)
class Served:
    """The models and settings that requests are checked against."""

    target: ModelInfo
    draft: ModelInfo | None
    tokenizer: Tokenizer
    defaults: Sampling
    config: ServiceConfig

    @property
    def context_tokens(self) -> int:
        return min(self.target.max_context_tokens, self.target.kv_cache_tokens)

    @property
    def max_request_bytes(self) -> int:
        """Longest message that can be served, in bytes. The prompt of a longer one cannot fit into the context."""
        context = self.target.max_context_tokens
        text = self.tokenizer.max_text_bytes(context)
        most = self.config.limits.max_message_bytes
        return most if text is None else min(most, text + 2 * context * MAX_ID_BYTES + OTHER_FIELDS_BYTES)


@dataclass(frozen=True, slots=True)
class Watch:
    """Metrics and spans of one request."""

    meter: RequestMeter
    spans: RequestSpans | None = None
    """None if the request is not traced."""


async def _nothing_known() -> Sequence[EngineStats]:
    return ()


@dataclass(slots=True)
class Hosted:
    """One model that requests can name."""

    completions: Service
    served: Served
    meters: Meters
    tracing: Tracing | None = None
    num_replicas: Mapping[str, int] = field(default_factory=dict)
    """Last known number of running replicas of `target`, `draft` and further drafts; empty if unknown."""

    target_stats: Callable[[], Awaitable[Sequence[EngineStats]]] = _nothing_known
    """Returns the statistics of the targets' engines."""

    @property
    def name(self) -> str:
        return self.served.config.model_name

    @contextmanager
    def request(self) -> Iterator[Watch]:
        """Measure, and trace if enabled, one request from its arrival to its end."""
        with self.meters.request() as meter:
            if self.tracing is None:
                yield Watch(meter)
                return
            with self.tracing.request(self.name, calls.current()) as spans:
                yield Watch(meter, spans)

    def show_draft(self, draft: ModelInfo) -> None:
        self.served = replace(self.served, draft=draft)


class Models:
    """The models of one orchestrator. The first is the default for requests that name none."""

    def __init__(self, models: Sequence[Hosted]) -> None:
        self._models = {model.name: model for model in models}
        self._default = models[0]
        self.max_request_bytes = max(model.served.max_request_bytes for model in models)
        """Longer messages are refused undecoded: they fit no model."""
        self.is_winding_down = False

    def __getitem__(self, name: str) -> Hosted:
        if not name:
            return self._default
        if (model := self._models.get(name)) is None:
            here = ", ".join(repr(each) for each in self._models)
            raise UnknownModel(f"there is no model {name[:100]!r} here; this server has {here}")
        return model

    @property
    def all(self) -> Sequence[Hosted]:
        return tuple(self._models.values())

    @property
    def places(self) -> Places:
        """Limits for proxies. If there is a queue they exceed the real ones, because the queue decides on refusals."""
        limits = [model.served.config.limits for model in self.all]
        waits_s = [model.completions.full_wait_s for model in self.all]  # proxies refuse only if all models are full
        return Places(
            sum(each.max_sessions + each.max_queued + (DECIDED_BY_QUEUE if each.max_queued else 0) for each in limits),
            max(*waits_s, *(each.retry_after_s for each in limits)),
            self.max_request_bytes,
            self._default.name,
        )


async def load_of(model: Hosted) -> Load:
    """The model's current load. For an engine that is busy with a long pass, its last report is used."""
    targets = await model.target_stats()
    config, info = model.served.config, model.served.target
    blocks_each = info.kv_cache_tokens // config.target.engine.block_tokens
    return Load(
        model.name,
        model.completions.report().num_sessions,
        model.completions.num_waiting,
        kv_share(targets),
        config.target.engine.block_tokens,
        blocks_each * max(1, len(targets), model.num_replicas.get("target", 0)),
    )
