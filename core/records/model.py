"""Properties of a loaded model, and the results of an engine's warm-up."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.records.adapter import Adapter

STATES_BESIDE_GUESSES = 3
"""States of recurrent layers that a sequence needs besides one for each guess: after its last row, after the row
before, and after the next one."""


def max_guesses(num_states: int, num_sessions: float) -> int:
    """Number of guesses for which each session has states, if all sessions have as many."""
    return max(0, int(num_states / num_sessions) - STATES_BESIDE_GUESSES)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    vocab_size: int
    """Number of token ids. Rows of the embedding beyond it are padding and masked."""
    max_context_tokens: int
    kv_cache_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    digest: str = ""
    """Digest of configuration and weights, prefixed with its kind and a colon (`workers.model.digest`). Empty if there
    are no files."""
    arithmetic: str = ""
    """Everything besides weights and dtype that decides the last bits: hardware, libraries, backend, ranks."""
    layers: tuple[int, ...] = ()
    """Indices of the checkpoint's layers that this model has; empty for all. `digest` covers the whole checkpoint."""
    num_states: int = 0
    """Number of states of recurrent layers, for all sessions together; 0 for a model without such layers."""
    feature_layers: tuple[int, ...] = ()
    """Layers whose hidden states are features: those that a target returns, or those that a head reads."""
    feature_width: int = 0
    """Numbers per token of the features."""
    reads_prefix: bool = False
    """Whether it is a head with KV of its own, which reads features of the text before the last verdict, too."""
    head: str = ""
    """Name of the head in a target's engine; empty without one."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters that were loaded at start."""
    max_source_tokens: int = 0
    """Length of the longest source that its encoder reads, in tokens; 0 for a model without an encoder."""
    decoder_start: tuple[int, ...] = ()
    """Tokens that the text after the source begins with."""
    is_deterministic: bool = False
    """Whether a row's bits are independent of the other rows of its step, by the self-test at start."""
    step_times_s: tuple[tuple[int, float], ...] = field(default=(), compare=False)
    """(number of rows, duration of a step in seconds), measured at start; empty if it was not."""

    def text_limit(self, num_source: int) -> int:
        """Length of the longest text whose first `num_source` tokens are its source: an encoder-decoder's context is
        that of its decoder, which does not read them."""
        return self.max_context_tokens + (num_source if self.max_source_tokens else 0)

    def draft_problem(self, draft: ModelInfo) -> str | None:
        """Why this target does not send what a draft reads: a source, or features for a head; None if it does."""
        if draft.max_source_tokens and not self.max_source_tokens:
            return "it is an encoder-decoder, which needs a source, but the target has no encoder"
        own, needed = (self.feature_layers, self.feature_width), (draft.feature_layers, draft.feature_width)
        if not draft.feature_width or own == needed:
            return None
        return (
            f"it is a head that reads {needed[1]} numbers a token, of the layers {list(needed[0])}, but the target "
            f"returns {own[1]}, of {list(own[0])}: set feature_layers of the target's engine"
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of an engine's warm-up for one model and configuration on one machine.

    A replacement engine on the same machine reuses them and is ready sooner. A replica passes them from one engine to
    the next. Defined here because a type of `workers` would make the replica import torch.
    """

    machine: str
    """Unique name of the machine."""
    is_compiled: bool
    """Whether steps run on a compiled backend: native code or CUDA graphs."""
    tile_rows: int | None
    """Rows per tile in deterministic mode: with this number, a row's bits are independent of other rows. None in other
    modes, or if no number works."""
    step_times_s: tuple[tuple[int, float], ...]
    """(number of rows, duration of a step in seconds)."""
