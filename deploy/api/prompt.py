"""The prompt of a request as token ids: a text, token ids or a chat."""

from __future__ import annotations

from core.errors import InvalidRequest
from deploy.api.checks import check_length, context_exceeded, require, text_ids, token_ids
from deploy.api.given import Chat, Given
from deploy.api.hosted import Served
from orchestrator.text import Tokenizer


def prompt_ids(given: Given, served: Served, context: int) -> tuple[int, ...]:
    """The token ids of the prompt. One that does not fit into a context of `context` tokens with another token is
    refused, a text that cannot fit before it is tokenized.

    Raises: InvalidRequest.
    """
    tokenizer = served.tokenizer
    kept = _kept_tokens(given, context)
    if given.text is not None:
        field = "text"
        if kept is None:
            check_length(given.text, field, tokenizer, context)
        prompt = text_ids(tokenizer.encode(given.text), field, tokenizer, served.target)
    elif given.token_ids is not None:
        field, ids = "token_ids.ids", given.token_ids
        if kept is None and len(ids) >= context:
            raise context_exceeded(
                "token_ids", f"must be at most {context - 1} tokens long, got {len(ids)}", context, len(ids)
            )
        prompt = token_ids(ids, field, served.target)
    elif given.chat is not None:
        field, text = "chat.messages", _chat_text(given.chat, given, tokenizer)
        if kept is None:
            check_length(text, field, tokenizer, context)
        prompt = text_ids(tokenizer.encode(text, add_special_tokens=False), field, tokenizer, served.target)
    else:
        field, prompt = given.prompt_field, ()
    if not prompt:
        raise InvalidRequest(field, "must hold at least one token")
    return prompt if kept is None else prompt[-kept:]


def _kept_tokens(given: Given, context: int) -> int | None:
    """Most tokens to keep from the end of the prompt; None keeps all."""
    most = given.truncate_prompt_tokens
    require(most is None or most == -1 or most >= 1, "truncate_prompt_tokens", "-1 (what fits) or at least 1", most)
    return max(1, context - max(1, given.max_tokens or 1)) if most == -1 else most


def _chat_text(chat: Chat, given: Given, tokenizer: Tokenizer) -> str:
    if not chat:
        raise InvalidRequest("chat.messages", "must hold at least one message")
    for index, message in enumerate(chat):
        if not message["role"]:
            raise InvalidRequest(f"chat.messages[{index}].role", "must not be empty")
    if given.tools and "tools" not in (tokenizer.template or "tools"):
        raise InvalidRequest("chat.tools", "must not be given: this model's chat template takes no tools")
    return tokenizer.chat_text(chat, given.tools, given.template_arguments, continues=given.continues)
