"""Commands that make heads: texts to train on, and the training."""
