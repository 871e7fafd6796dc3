"""Pipelined rounds against sequential ones: simulated, by real processes, and drawn."""
