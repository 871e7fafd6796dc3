"""Model execution: runtime, caches, sampling, verification, and the draft and target engines.

Knows torch and `core`; must not know Ray, gRPC or the orchestrator.
"""
