"""Starts the application on this machine or on an existing Ray cluster."""

from deploy.launch.cluster import OBJECT_STORE_BYTES, Endpoints, local_cluster
from deploy.launch.local import changed_settings, describe_models, drain, served
from deploy.launch.probe import engine_of, engines_of

__all__ = [
    "OBJECT_STORE_BYTES",
    "Endpoints",
    "changed_settings",
    "describe_models",
    "drain",
    "engine_of",
    "engines_of",
    "local_cluster",
    "served",
]
