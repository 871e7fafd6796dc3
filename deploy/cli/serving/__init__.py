"""Checks of `serve` before it starts, and the signals that end it."""
