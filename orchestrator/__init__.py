"""From a request to its stream: admission, sessions, rounds, batching, and text to tokens and back.

Asyncio only: knows no Ray, no torch, no gRPC. Engines are reached through `core.ports`.
"""
