"""The metrics for operators, and when they are recorded."""

from deploy.metrics.instruments import (
    ENGINE_CATALOGUE,
    MODEL_LABEL,
    ORCHESTRATOR_CATALOGUE,
    REQUEST_FAILURE,
    ServeRecorder,
)
from deploy.metrics.meters import EngineMeter, Meters, RequestMeter, code_of

__all__ = [
    "ENGINE_CATALOGUE",
    "MODEL_LABEL",
    "ORCHESTRATOR_CATALOGUE",
    "REQUEST_FAILURE",
    "EngineMeter",
    "Meters",
    "RequestMeter",
    "ServeRecorder",
    "code_of",
]
