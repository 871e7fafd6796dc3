"""OpenAI's API: completions, chat completions and responses."""

from deploy.http.openai.bodies import CompletionBody
from deploy.http.openai.chat_body import ChatBody
from deploy.http.openai.chat_reply import ChatReply
from deploy.http.openai.completion_reply import CompletionReply
from deploy.http.openai.replies import model_card
from deploy.http.openai.responses_body import ResponsesBody
from deploy.http.openai.responses_reply import ResponsesReply

__all__ = [
    "ChatBody",
    "ChatReply",
    "CompletionBody",
    "CompletionReply",
    "ResponsesBody",
    "ResponsesReply",
    "model_card",
]
