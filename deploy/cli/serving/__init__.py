"""What `serve` checks before it starts, and how it ends."""
