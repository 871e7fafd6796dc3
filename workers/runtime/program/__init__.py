"""A model's forward pass as a program of native code: recorded, assembled and run."""
