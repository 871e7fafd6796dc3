"""Anthropic's API: messages, and counting their tokens."""

from deploy.http.anthropic.bodies import CountBody, MessagesBody
from deploy.http.anthropic.replies import MessagesReply

__all__ = ["CountBody", "MessagesBody", "MessagesReply"]
