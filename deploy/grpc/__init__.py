"""The public API by gRPC: from bytes to requests, from chunks to replies, and what happens in the proxy."""

from deploy.grpc.authentication import Gate, tokens_path
from deploy.grpc.proxy import STOP_FILE
from deploy.grpc.servicer import Hosted, Served, Servicer
from deploy.grpc.translate import sampling_defaults

__all__ = ["STOP_FILE", "Gate", "Hosted", "Served", "Servicer", "sampling_defaults", "tokens_path"]
