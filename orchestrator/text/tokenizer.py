"""Text to token ids and back, with the model's own tokenizer files, read by transformers.

Knows the tokenizer files of a checkpoint (tokenizer.json, tokenizer_config.json, chat_template.jinja and others); must
not know weights, requests or streams (`orchestrator.text.detokenize` decodes growing outputs). transformers is imported
when a tokenizer is read, and does not import torch for it (docs/adr/edge).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from core.errors import CheckpointError, InvalidRequest, cause


def _byte_of_char() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary.

    Printable Latin-1 characters are their own bytes. The other bytes, in order, map to the characters from U+0100 on.
    Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


BYTE_OF_CHAR = _byte_of_char()
CONTINUATION_MARKER = "<continued here>"
"""Marker for the end of a message to be continued, so that the text added by the template can be cut off."""
VISIBLE_SPECIAL_TOKENS = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"})
"""Tokens kept in decoded text even if a tokenizer calls them special: they separate tool calls and reasoning from
answers."""
MAX_COMPOSITION = 4
"""Largest ratio by which composing characters (NFC) shortens a text, rounded up: 3.5, for U+1FBE U+0308 U+0341."""


PROCESSOR_TEMPLATE = "chat_template.json"
"""File with the chat template of some multimodal checkpoints. transformers reads it only with their processor."""
TEMPLATES = ("default", "tool_use")
"""Names of the chat templates used if a checkpoint has several. The second is used for requests with tools."""


class Tokenizer:
    """One model's tokenizer and chat template. Created by `from_directory`; immutable."""

    def __init__(self, read: Any) -> None:
        """Wrap a `PreTrainedTokenizerFast` of transformers. Raises: CheckpointError for an invalid template."""
        backend = _with_visible_tokens(read.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._read = read
        templates = list(_templates(read.chat_template))
        self.template = "\n".join(templates) or None
        """Text of the chat templates; None without any."""
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.template_variables = frozenset(name for template in templates for name in _variables(template))
        """Variables that the chat templates read."""
        own = {"messages", *inspect.signature(read.apply_chat_template).parameters, *read.special_tokens_map}
        self._arguments = self.template_variables - own
        """Template arguments that a request may set."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        described = backend.to_str()
        parts = json.loads(described)
        self.is_byte_level = _is_byte_level(parts["decoder"])
        self.digest = _digest(described, read.special_tokens_map, templates)
        """Hash of everything that affects encoding and decoding."""
        self._max_token_bytes = self._longest_token(parts) if self.is_byte_level and _keeps_text(parts) else None

    def _longest_token(self, parts: Mapping[str, Any]) -> int | None:
        """Return the length of the longest token, in bytes of text before normalization; None if some bytes have no
        token."""
        if any(self._backend.token_to_id(char) is None for char in BYTE_OF_CHAR):
            return None  # BPE drops bytes without a token
        growth = MAX_COMPOSITION if parts["normalizer"] is not None else 1
        return growth * max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint.

        Raises: CheckpointError if a file is missing or invalid.
        """
        from transformers import PreTrainedTokenizerFast  # imported here, since it takes half a second

        if not (Path(path) / "tokenizer.json").is_file():
            raise CheckpointError(f"{path} has no tokenizer.json")
        try:
            read = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            if read.chat_template is None and (file := Path(path) / PROCESSOR_TEMPLATE).is_file():
                read.chat_template = json.loads(file.read_text())["chat_template"]
            return cls(read)
        except Exception as error:  # tokenizers raises bare Exception, and a malformed file may cause any other
            raise CheckpointError(f"the tokenizer of {path} cannot be read: {cause(error)}") from error

    @property
    def vocabulary_hash(self) -> str:
        """Hash of the string of each token id, including added tokens."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        tokens = sorted((token_id, token) for token, token_id in vocabulary.items())
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids. Special tokens are added by the tokenizer's own post-processor."""
        # Unlike `encode`, this releases the interpreter lock (tokenizers 0.23, measured with a second thread). It is
        # also faster at every length: 13 instead of 15 us for 10 characters, 53 instead of 79 ms for 64,000.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def max_text_bytes(self, num_tokens: int) -> int | None:
        """Return the maximum length of a text of `num_tokens` tokens, in bytes; None if a token may stand for text of
        any length."""
        return None if self._max_token_bytes is None else num_tokens * self._max_token_bytes

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of these ids. Bytes that are not UTF-8 become U+FFFD; ids without a token are skipped."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token of a byte-level vocabulary. A character may be split over several tokens."""
        assert self.is_byte_level, "only the tokens of a byte-level vocabulary stand for bytes"
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if any(char not in BYTE_OF_CHAR for char in token):
            return token.encode()  # an added token, stored as plain text
        return bytes(BYTE_OF_CHAR[char] for char in token)

    def is_special(self, token_id: int) -> bool:
        """Whether decoding skips this id (beginning and end of sequence, chat roles)."""
        return token_id in self._special_ids

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> str:
        """Render the prompt for these messages (each has `role` and `content`).

        If `continues`, the prompt ends with the content of the last message. `tools` and `arguments` are passed to the
        template unchanged. The template contains the special tokens, so encoding must add none.

        Raises: InvalidRequest if the model has no chat template, or the template refuses the messages.
        """
        if self.template is None:
            instead = "send a plain prompt instead (gRPC: text or token_ids; HTTP: /v1/completions)"
            raise InvalidRequest("chat", f"this model has no chat template; {instead}")
        for_template = {name: value for name, value in (arguments or {}).items() if name in self._arguments}
        shown = [dict(message) for message in messages]
        if continues:
            shown[-1]["content"] += CONTINUATION_MARKER
        try:
            text: str = self._read.apply_chat_template(
                shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=not continues, **for_template
            )
        except Exception as error:  # a template is a program by the model's author, and may raise anything
            raise InvalidRequest("chat", f"the model's chat template refuses these messages: {error}") from error
        if continues and CONTINUATION_MARKER not in text:
            raise InvalidRequest(
                "chat", "the last message cannot be continued: the model's chat template leaves it out"
            )
        return text.rpartition(CONTINUATION_MARKER)[0] if continues else text


def _with_visible_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that decodes VISIBLE_SPECIAL_TOKENS as text."""
    tokens = backend.get_added_tokens_decoder().values()
    if not any(token.special and token.content in VISIBLE_SPECIAL_TOKENS for token in tokens):
        return backend
    parts = json.loads(backend.to_str())
    for token in parts["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in VISIBLE_SPECIAL_TOKENS
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _keeps_text(parts: Mapping[str, Any]) -> bool:
    """Whether each byte of a text ends up in some token, so that the longest token bounds the length of a text.

    Added tokens that swallow adjacent spaces, and parts that drop or fold text, set no such bound.
    """
    swallows = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    normalizer = parts["normalizer"]
    is_kept = normalizer is None or normalizer["type"] == "NFC"
    return is_kept and not swallows and not parts["model"].get("fuse_unk") and _splits_only(parts["pre_tokenizer"])


def _splits_only(splitter: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer splits without dropping text."""
    if splitter is None or splitter["type"] in ("ByteLevel", "Digits"):
        return True
    if splitter["type"] == "Sequence":
        return all(map(_splits_only, splitter["pretokenizers"]))
    return bool(splitter["type"] == "Split" and splitter["behavior"] != "Removed")


def _templates(given: str | Mapping[str, str] | None) -> Iterator[str]:
    by_name = given if isinstance(given, Mapping) else {"default": given}
    yield from filter(None, map(by_name.get, TEMPLATES))


def _variables(template: str) -> frozenset[str]:
    """Raises: CheckpointError."""
    import jinja2
    from transformers.utils.chat_template_utils import (
        _get_template_variables,
    )  # supports transformers' Jinja extensions

    try:
        found: frozenset[str] = _get_template_variables(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"a chat template is not a Jinja template: {error}") from error
    return found


def _digest(backend: str, special_tokens: Mapping[str, str], templates: Sequence[str]) -> str:
    parts = json.dumps([backend, special_tokens, templates], sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(parts.encode()).hexdigest()}"
