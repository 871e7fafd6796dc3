"""Streams while processes die, stop or are replaced."""
