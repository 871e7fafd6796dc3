"""The state of the service, for the page: control, queue and replicas, as in GetModelInfo.

Pure; fields have the proto's names.
"""

from __future__ import annotations

from typing import Any

from core.records import ModelInfo
from deploy.api import Hosted
from orchestrator.policy import ControlReport


def status_fields(model: Hosted) -> dict[str, Any]:
    """One model, as seen by the orchestrator that answers."""
    served, completions = model.served, model.completions
    report = completions.report()
    return {
        "model": model.name,
        "target": _model(served.target),
        "draft": None if served.draft is None else _model(served.draft),
        "replicas": model.num_replicas,
        "queue": {
            "running": report.num_sessions,
            "waiting": completions.num_waiting,
            "expected_wait_s": completions.expected_wait_s,
            "max_sessions": served.config.limits.max_sessions,
        },
        "control": _control(report),
    }


def _model(info: ModelInfo) -> dict[str, Any]:
    return {"name": info.name, "num_parameters": info.num_parameters, "dtype": info.dtype, "device": info.device}


def _control(report: ControlReport) -> dict[str, Any]:
    return {
        "policy": report.policy,
        "draft_tokens": report.draft_tokens,
        "block_tokens": report.block_tokens,
        "reason": report.reason,
        "acceptance": report.acceptance,
        "hit_rate": report.hit_rate,
        "wire_s": report.wire_s,
        "changes": report.num_changes,
    }
