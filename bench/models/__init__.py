"""Models for benchmarks: grown checkpoints, their sizes, prompts and recorded agreement."""
