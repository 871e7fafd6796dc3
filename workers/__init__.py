"""Models at work: runtime, caches, sampling, verification and the draft and target engines.

Knows torch and `core`; no Ray, no gRPC, and nothing of the orchestrator.
"""
