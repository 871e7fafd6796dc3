"""Starts the application on this machine, on a Ray cluster of its own."""

from deploy.launch.cluster import OBJECT_STORE_BYTES, Endpoints, local_cluster, prepare_environment
from deploy.launch.local import changed_settings, describe_models, drain, served

__all__ = [
    "OBJECT_STORE_BYTES",
    "Endpoints",
    "changed_settings",
    "describe_models",
    "drain",
    "local_cluster",
    "prepare_environment",
    "served",
]
