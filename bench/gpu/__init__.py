"""Benchmarks on a GPU: kernels, steps and text."""
