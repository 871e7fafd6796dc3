"""Serves completions: admission, sessions, rounds, batching, tokenization and detokenization.

Asyncio only: knows no Ray, no torch, no gRPC. Engines are reached through `core.ports`.
"""
