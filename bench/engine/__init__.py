"""Benchmarks of engines in this process, without Ray and gRPC: speed, exactness, architectures."""
