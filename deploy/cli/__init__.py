"""The command `outrider`."""
