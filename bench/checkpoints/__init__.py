"""Which of the most used checkpoints are served, what they need, and why others are not."""
