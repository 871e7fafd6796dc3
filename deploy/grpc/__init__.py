"""The gRPC API: decoding of requests, encoding of replies, and the layer in Serve's proxy."""

from deploy.grpc.binding import GRPC_HOST, listen_at
from deploy.grpc.proxy import take_bursts
from deploy.grpc.reflection import reflect_by_both_versions
from deploy.grpc.servicer import Servicer

__all__ = ["GRPC_HOST", "Servicer", "listen_at", "reflect_by_both_versions", "take_bursts"]
