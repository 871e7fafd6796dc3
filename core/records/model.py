"""What is known of a loaded model, and what its engine has found out at its start."""

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


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of an engine's warm-up, for one model with one configuration, on one machine.

    An engine that replaces it on the same machine reuses them, and is ready sooner. A replica carries them from one
    engine to the next: a type of `workers` would have it import torch to read them.
    """

    machine: str
    """A name that no other machine has."""
    is_compiled: bool
    """Whether steps run by a compiled backend: native code or CUDA graphs."""
    tile_rows: int | None
    """In deterministic mode, the number of rows to a tile with which a row's bits do not depend on other rows; None in
    other modes, or where no number does."""
    step_times_s: tuple[tuple[int, float], ...]
    """Pairs of a number of rows and the duration of such a step."""
