"""The models that one orchestrator serves over gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from core.config import ServiceConfig
from core.errors import InvalidRequest, UnknownModel
from core.records import Adapter, EngineStats, ModelInfo, Sampling
from deploy import calls
from deploy.api.proxy.admission import Places
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
    adapter: Adapter | None = None
    """The adapter that the request has named; None for the model itself."""

    @property
    def name(self) -> str:
        """The name in requests."""
        return self.config.model_name if self.adapter is None else self.adapter.name

    def with_adapter(self, name: str | None) -> Served:
        """The model with this adapter of the settings; the model itself for None. Raises: InvalidRequest."""
        adapters = {adapter.name: adapter for adapter in self.target.adapters}
        if name is not None and name not in adapters:
            raise InvalidRequest("adapter", f"must be one of {', '.join(adapters) or 'none'}, got {name!r}")
        return self if name is None else replace(self, adapter=adapters[name])

    @property
    def context_tokens(self) -> int:
        return self.text_limit(0)

    def text_limit(self, num_source: int) -> int:
        """Length of the longest text whose first `num_source` tokens are its source."""
        return min(self.target.text_limit(num_source), self.target.kv_cache_tokens)

    @property
    def max_request_bytes(self) -> int:
        """Longest message that can be served, in bytes. The prompt of a longer one cannot fit into the context."""
        context = self.target.max_context_tokens + self.target.max_source_tokens
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


class AdapterStore(Protocol):
    """Loads and unloads adapters while a model is served."""

    async def load(self, adapter: Adapter) -> None:
        """Load it on a target, and list it. Raises: StartupError if it cannot be served; Unavailable."""

    async def unload(self, name: str) -> None:
        """List it no more. Streams that use it go on."""

    async def listed(self) -> Mapping[str, Adapter]:
        """All that are loaded beside those of the settings, by name."""


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
    adapter_store: AdapterStore | None = None
    """None if only the adapters of the settings are served (`http.load_adapters`)."""
    loaded_adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """Adapters that were loaded while the model was served, as last seen, by name."""

    @property
    def name(self) -> str:
        return self.served.name

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """All adapters of the model, by name; those of the settings first."""
        return {**{adapter.name: adapter for adapter in self.served.target.adapters}, **self.loaded_adapters}

    async def look_for_adapters(self) -> None:
        """Learn which adapters were loaded and unloaded, here or through another orchestrator."""
        if self.adapter_store is not None:
            self.loaded_adapters = await self.adapter_store.listed()

    def with_adapter(self, adapter: Adapter) -> Hosted:
        """The model as a request that names this adapter sees it."""
        return replace(self, served=replace(self.served, adapter=adapter))

    @contextmanager
    def request(self) -> Iterator[Watch]:
        """Measure, and trace if enabled, one request from its arrival to its end."""
        with self.meter() as meter:
            if self.tracing is None:
                yield Watch(meter)
                return
            with self.tracing.request(self.name, calls.current()) as spans:
                yield Watch(meter, spans)

    def meter(self) -> AbstractContextManager[RequestMeter]:
        """Measure one sample of a request."""
        adapter = self.served.adapter
        return self.meters.request(adapter.name if adapter is not None else None)

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
        if (model := self._models.get(name)) is not None:
            return model
        for each in self._models.values():
            if (adapter := each.adapters.get(name)) is not None:
                return each.with_adapter(adapter)
        here = ", ".join(repr(each.name) for each in self.named)
        raise UnknownModel(f"there is no model {name[:100]!r} here; this server has {here}")

    @property
    def all(self) -> Sequence[Hosted]:
        return tuple(self._models.values())

    @property
    def named(self) -> Sequence[Hosted]:
        """Everything that a request can name: each model, followed by its adapters."""
        return [
            each
            for model in self._models.values()
            for each in (model, *(model.with_adapter(adapter) for adapter in model.adapters.values()))
        ]

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
