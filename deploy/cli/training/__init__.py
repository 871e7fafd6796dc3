"""Commands that make heads and drafts: texts to train on, and the training."""
