"""Benchmarks of streams while processes die, stop or are replaced."""
