"""Other servers beside ours, on the same machine and the same weights."""
