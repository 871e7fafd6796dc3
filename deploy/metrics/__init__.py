"""The numbers that operators see, and when they are counted."""

from deploy.metrics.instruments import ENGINE_CATALOGUE, ORCHESTRATOR_CATALOGUE, REQUEST_FAILURE, ServeRecorder
from deploy.metrics.meters import EngineMeter, Meters, RequestMeter

__all__ = [
    "ENGINE_CATALOGUE",
    "ORCHESTRATOR_CATALOGUE",
    "REQUEST_FAILURE",
    "EngineMeter",
    "Meters",
    "RequestMeter",
    "ServeRecorder",
]
