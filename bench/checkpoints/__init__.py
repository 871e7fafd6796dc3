"""Survey of the most used checkpoints: which are served, what they need, and why others are not."""
