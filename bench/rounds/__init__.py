"""Benchmarks of pipelined rounds against sequential ones: simulated, by real processes, and drawn."""
