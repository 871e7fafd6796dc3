"""The command `outrider`."""

from deploy.cli.client import Client

__all__ = ["Client"]
