"""The text that engines begin with: a prompt; for an encoder-decoder its source, then the beginning of its own text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from core.errors import InvalidRequest
from deploy.api.checks import text_ids, token_ids
from deploy.api.given import Given
from deploy.api.hosted import Served
from deploy.api.prompt import prompt_ids

FIELD, IDS = "source", "source_token_ids"


def beginning(given: Given, served: Served) -> tuple[tuple[int, ...], int]:
    """The tokens that a request's text begins with, and the number of those that are its source.

    For an encoder-decoder the prompt is the source, unless the request has a `source`: the prompt then begins the
    decoder's text, and may be missing. Raises: InvalidRequest.
    """
    info, has_source = served.target, given.source is not None or given.source_token_ids is not None
    if not info.max_source_tokens:
        if has_source:
            field = FIELD if given.source is not None else f"{IDS}.ids"
            raise InvalidRequest(field, f"must not be given: {served.name} is a model without an encoder")
        return prompt_ids(given, served, served.context_tokens), 0
    if given.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", f"must be unset: {served.name} is an encoder-decoder")
    source = _source(given, served) if has_source else _whole(given, served)
    prefix = _prefix(given, served) if has_source else ()
    start = info.decoder_start[:1] if prefix else info.decoder_start
    return (*source, *start, *prefix), len(source)


def _source(given: Given, served: Served) -> tuple[int, ...]:
    if given.source is not None and given.source_token_ids is not None:
        raise InvalidRequest(FIELD, "must not be given beside source_token_ids")
    of_source = replace(given, text=given.source, token_ids=given.source_token_ids, chat=None)
    with _named_source():
        return _whole(of_source, served)


def _whole(given: Given, served: Served) -> tuple[int, ...]:
    """The prompt as a source. Special tokens alone are none."""
    if given.text == "":
        raise InvalidRequest("text", "must hold at least one token")
    return prompt_ids(given, served, served.target.max_source_tokens + 1)


@contextmanager
def _named_source() -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        field = error.field.replace("token_ids", IDS) if error.field.startswith("token_ids") else FIELD
        raise type(error)(field, error.problem) from None


def _prefix(given: Given, served: Served) -> tuple[int, ...]:
    """Tokens of the decoder's text after its start token."""
    if given.chat is not None:
        raise InvalidRequest(FIELD, "must not be given beside a chat, which is the source of an encoder-decoder")
    if given.token_ids is not None:
        return token_ids(given.token_ids, "token_ids.ids", served.target)
    ids = served.tokenizer.encode(given.text or "", add_special_tokens=False)
    return text_ids(ids, "text", served.tokenizer, served.target)
