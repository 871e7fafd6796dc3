"""`outrider chat`: a conversation with a server's model in the terminal."""

from deploy.cli.chat.command import ChatOptions, chat

__all__ = ["ChatOptions", "chat"]
