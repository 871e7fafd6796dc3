"""Composition of the service: Ray Serve deployments, gRPC and HTTP servers, settings, command line.

The only folder that imports Ray and gRPC. It may import every other folder; no other folder imports it.
"""
