"""Benchmarks of adaptive control and its parts, and of the cost and worth of guessers."""
