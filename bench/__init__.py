"""Benchmarks: programs that print ratios with their settings, and write them as JSON."""

import os

# Must be set before gRPC is imported: its fork handlers crash nodes that are started while streams run.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
