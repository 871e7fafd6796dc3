"""The place of composition: Ray Serve deployments, gRPC ingress, settings, command line.

The one folder that imports Ray and gRPC; it may know all the others, and none of them knows it.
"""
