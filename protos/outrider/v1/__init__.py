"""Version 1: generation.proto is the source; its code is in the Python client (`python -m protos.generate`)."""

from outrider_client._proto import generation_pb2, generation_pb2_grpc

__all__ = ["generation_pb2", "generation_pb2_grpc"]
