"""From a request to its stream: admission, sessions, rounds, batching, and the way between text and tokens.

Asyncio only: knows no Ray, no torch, no gRPC. Engines are reached through `core.ports`.
"""
