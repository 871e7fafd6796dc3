"""Composition of the service: Ray Serve deployments, gRPC and HTTP servers, settings, command line.

The only folder of the server that imports Ray and gRPC. It may import `core`, `orchestrator`, `workers` and
`simulation`, which must not import it.
"""
