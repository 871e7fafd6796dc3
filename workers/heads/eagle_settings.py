"""Reads the config.json of an EAGLE head, whatever publisher wrote it. Must not know tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import LlamaConfig

from core.errors import CheckpointError
from workers.model import quiet_transformers

LAST_STATE: Final = (-1,)
"""Layers of heads that read the target's last hidden state alone."""
SPECULATORS: Final = ("eagle", "eagle3", "peagle")
"""Kinds of the library speculators that are read; a block drafter has tensors of the same names."""
MASK_KEYS: Final = ("mask_token_id", "pard_token", "ptd_token_id")
ROPE_KEYS: Final = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


class EagleSettings:
    """A config.json whose keys stand at the top, in `transformer_layer_config` or in `eagle_config`."""

    def __init__(self, file: Path, stored: Mapping[str, Any]) -> None:
        self._file = file
        self._eagle: Mapping[str, Any] = stored.get("eagle_config") or {}
        self._top = stored
        self._all = {**self._eagle, **(stored.get("transformer_layer_config") or {})}
        self._all = {**self._all, **{key: value for key, value in stored.items() if value is not None}}

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self._top

    def get(self, name: str, default: Any = None) -> Any:
        value = self._all.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._file}: {name} must be a number from 1, got {value!r}")
        return value

    def check(self) -> None:
        """Raises: CheckpointError for what would be computed otherwise."""
        refused = {
            "hidden_act": self.get("hidden_act", "silu") != "silu",
            "use_aux_hidden_state": self._eagle.get("use_aux_hidden_state") is False,
            "speculators_model_type": self._top.get("speculators_model_type", "eagle3") not in SPECULATORS,
            "dflash_config": "dflash_config" in self._top,
            "markov_rank": "markov_rank" in self._top,
            "partial_rotary_factor": self.get("partial_rotary_factor", 1.0) != 1.0,
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise CheckpointError(f"{self._file}: {name} {self.get(name)!r} is not served")

    def mask_token(self, vocab_size: int, *, has_mask: bool) -> int | None:
        """Id of the mask token of a head for parallel drafting; None for others. Raises: CheckpointError."""
        if not has_mask:
            if self.get("parallel_drafting", False):
                raise CheckpointError(f"{self._file}: parallel_drafting is set, but the head has no mask_hidden")
            return None
        token = next((self.get(key) for key in MASK_KEYS if self.get(key) is not None), None)
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{self._file}: {MASK_KEYS[0]} must be a token id below {vocab_size}, since the head has mask_hidden; "
                f"got {token!r}"
            )
        return token

    def feature_layers(self, num: int, model: str | None) -> tuple[int, ...]:
        """Layers by the key that its publisher uses (docs/adr/models.md); `feature_layers` overrides all."""
        of_outputs = self._eagle.get("eagle_aux_hidden_state_layer_ids") or self._top.get("target_layer_ids")
        as_written = self._top.get("feature_layers") or self._top.get("eagle_aux_hidden_state_layer_ids")
        if as_written:
            layers = tuple(as_written)
        elif of_outputs:
            layers = tuple(layer + 1 for layer in of_outputs)
        else:
            layers = self._usual_layers(model)
        lowest = LAST_STATE[0] if as_written else 0
        if len(layers) != num or len(set(layers)) != num or min(layers) < lowest:
            raise CheckpointError(
                f"{self._file}: its fc.weight reads {num} layers, but its layers are {list(layers)}; "
                "set feature_layers to their inputs, counted from 0"
            )
        return layers

    def _usual_layers(self, model: str | None) -> tuple[int, ...]:
        if model is None:
            raise CheckpointError(f"{self._file} names no layers: they follow from the target's number of layers")
        raw = json.loads((Path(model) / "config.json").read_text())
        num_layers = (raw.get("text_config") or raw).get("num_hidden_layers", 0)
        return (2, num_layers // 2, num_layers - 3)

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        window, kinds = self.get("sliding_window"), self.get("layer_types")
        if kinds is None:
            return (None,) * num_layers
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)[:num_layers]

    def rope(self, hidden_size: int, num_heads: int) -> LlamaConfig:
        """Its own rotary embedding, which is not the target's: without a key its base is 10000."""
        given = {key: self.get(key) for key in ROPE_KEYS if self.get(key) is not None}
        head_dim = self.size("head_dim", hidden_size // num_heads)
        with quiet_transformers():
            return LlamaConfig(hidden_size=hidden_size, num_attention_heads=num_heads, head_dim=head_dim, **given)
