"""What is measured, and how: programs that print ratios with their settings and write them as JSON."""

import os

# Before gRPC is imported: its fork handlers crash the nodes that are started while streams run.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
