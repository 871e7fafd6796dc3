"""What a GPU makes of kernels, steps and text."""
