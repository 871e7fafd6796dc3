"""What is known of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a loaded model."""

    name: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    vocab_size: int
    """Number of token ids; rows of the embedding beyond are padding and masked."""
    max_context_tokens: int
    kv_cache_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    digest: str = ""
    """Of configuration and weights, with its kind before the colon (`workers.model.digest`); empty where there are no
    files."""
    arithmetic: str = ""
    """Whatever decides on the last bits besides weights and dtype: hardware, libraries, backend, ranks."""
    layers: tuple[int, ...] = ()
    """Of the checkpoint's layers, those that this model has; empty for all. `digest` is the whole checkpoint's."""
    is_deterministic: bool = False
    """Whether a row's bits do not depend on the other rows of its step, as a self-test at start has found."""
