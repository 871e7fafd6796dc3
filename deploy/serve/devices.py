"""Checks that engines get the devices that their settings name: Ray shows an engine only the GPUs that it reserves."""

from __future__ import annotations

from collections.abc import Iterator

from core.config import FleetConfig, ServiceConfig, WorkerConfig
from core.errors import ConfigError


def check_devices(fleet: FleetConfig) -> None:
    """Raises: ConfigError, which says what to write instead."""
    for number, model in enumerate(fleet.models):
        prefix = f"models.{number}." if len(fleet.models) > 1 else ""
        for name, worker in _workers(model):
            _check(prefix + name, worker)
    for name, draft in fleet.drafts.items():
        _check(f"drafts.{name}", draft)


def _workers(model: ServiceConfig) -> Iterator[tuple[str, WorkerConfig]]:
    yield "target", model.target
    if model.draft is not None:
        yield "draft", model.draft
    yield from ((f"extra_drafts.{number}", draft) for number, draft in enumerate(model.extra_drafts))


def _check(name: str, worker: WorkerConfig) -> None:
    kind, _, index = worker.engine.device.partition(":")
    if kind != "cuda":
        return
    if index not in ("", "0"):
        raise ConfigError(
            f"{name}.engine.device must be cuda, got {worker.engine.device!r}: Ray chooses the GPU, and an engine sees "
            f"only those that it reserves; write {name}.engine.device=cuda, and choose the node by resources or labels"
        )
    if worker.num_gpus == 0:
        raise ConfigError(
            f"{name}.num_gpus must be above 0 for an engine on cuda, got 0: it would see no GPU; "
            f"write {name}.num_gpus=1, or a fraction where engines share a GPU, or {name}.engine.device=cpu"
        )
