"""OpenAI's API: completions, chat completions and responses; and vLLM's additions for adapters."""

from deploy.http.openai.adapters import LoadAdapterBody, UnloadAdapterBody, load_adapter, unload_adapter
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
    "LoadAdapterBody",
    "ResponsesBody",
    "ResponsesReply",
    "UnloadAdapterBody",
    "load_adapter",
    "model_card",
    "unload_adapter",
]
