"""The public API of Outrider, by version."""
