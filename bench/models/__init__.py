"""The models that benchmarks run: grown checkpoints, their sizes, prompts and recorded agreement."""
