"""Reads EAGLE heads as they are published: by their authors, and by SpecForge, AngelSlim, ModelOpt and speculators.

`config.json` rarely says that a head is one of EAGLE's, so kinds are recognised by keys and tensors, which are renamed
to one set of names. Knows files and shapes; must not know how a head computes (`workers.heads.eagle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaConfig

from core.errors import CheckpointError
from workers.heads.eagle_settings import LAST_STATE, EagleSettings
from workers.heads.tensors import check_names, check_of_target, check_tensors, read_tensors

NUM_FEATURE_LAYERS: Final = 3
FIRST_LAYER: Final = "layers.0."
RENAMED: Final = {
    "midlayer.": FIRST_LAYER,
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
UNREAD: Final = ("t2d", "inv_freq")
"""Ends of names: a mask that only training needs, and what follows from config.json."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE head. EAGLE-3 reads hidden states of several layers, EAGLE-1 and EAGLE-2 the last one."""

    name: str
    """Name of the directory."""
    is_eagle3: bool
    """Whether embedding and feature stay side by side up to the first layer's attention; else `fc` joins them."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    norm_eps: float
    vocab_size: int
    """Rows of the target's embedding."""
    draft_vocab_size: int
    """Number of tokens that it can guess."""
    feature_layers: tuple[int, ...]
    """Layers of the target whose hidden states it reads, numbered as `EngineConfig.feature_layers`."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer."""
    rope: LlamaConfig
    are_layers_given: bool = False
    """Whether its files name them by the inputs of layers, and not in one of its publishers' ways."""
    norm_before_residual: bool = False
    norm_output: bool = False
    """Whether a guess's feature is the normalized output (EAGLE-3.1)."""
    logit_scale: float = 1.0
    mask_token: int | None = None
    """The token that rows of guesses read in parallel drafting (P-EAGLE), with `mask_hidden` as the target's
    states, in place of what they guess."""
    names: frozenset[str] = frozenset()
    """Its tensors, after renaming; some of them are optional."""

    @property
    def feature_width(self) -> int:
        return len(self.feature_layers) * self.target_hidden_size

    def check_target(self, hidden_size: int, vocab_size: int) -> None:
        """Raises: CheckpointError for a target that this head was not trained for."""
        own = {"target_hidden_size": self.target_hidden_size, "vocab_size": self.vocab_size}
        check_of_target(self.name, own, (hidden_size, vocab_size))

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors that it needs, and of the optional ones that it has."""
        for layer in range(self.num_layers):
            for name, shape in self._shapes_of_layer(is_wide=self.is_eagle3 and layer == 0):
                yield f"layers.{layer}.{name}", shape
        hidden, width = self.hidden_size, self.feature_width
        yield "fc.weight", (hidden, width if self.is_eagle3 else hidden + width)
        if self.is_eagle3:
            yield "norm.weight", (hidden,)
        if self.draft_vocab_size != self.vocab_size or "d2t" in self.names:
            yield "d2t", (self.draft_vocab_size,)
        yield from self._optional()

    def _shapes_of_layer(self, *, is_wide: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        for name, heads in (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
            yield f"self_attn.{name}_proj.weight", (heads * self.head_dim, 2 * hidden if is_wide else hidden)
        yield "self_attn.o_proj.weight", (hidden, self.num_heads * self.head_dim)
        yield "mlp.gate_proj.weight", (inner, hidden)
        yield "mlp.up_proj.weight", (inner, hidden)
        yield "mlp.down_proj.weight", (hidden, inner)
        yield "post_attention_layernorm.weight", (hidden,)
        if is_wide:
            yield "input_layernorm.weight", (hidden,)
            yield "hidden_norm.weight", (hidden,)

    def _optional(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.hidden_size
        optional: dict[str, tuple[int, ...]] = {
            "fc.bias": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
            "embed_tokens.weight": (self.vocab_size, hidden),
        }
        if self.is_eagle3:
            optional["input_norm.weight"] = (self.feature_width,)
            optional["mask_hidden"] = (1, self.feature_width)
            for index in range(len(self.feature_layers)):
                optional[f"fc_norm.{index}.weight"] = (self.target_hidden_size,)
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            for name in ("input_layernorm", "hidden_norm") if layer else ():
                optional[f"{prefix}{name}.weight"] = (hidden,)
            for name, heads in (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
                optional[f"{prefix}self_attn.{name}_proj.bias"] = (heads * self.head_dim,)
            for name in ("q_norm", "k_norm"):
                optional[f"{prefix}self_attn.{name}.weight"] = (self.head_dim,)
            optional[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
        yield from ((name, shape) for name, shape in optional.items() if name in self.names)


def is_eagle(stored: Mapping[str, Any]) -> bool:
    """Whether this config.json may be that of an EAGLE head: of a transformer with the sizes of one."""
    shape = {**stored, **(stored.get("transformer_layer_config") or {})}
    return "num_attention_heads" in shape


def read_eagle(path: str, stored: Mapping[str, Any], model: str | None) -> EagleConfig:
    """The head of a directory with this config.json. `model`: directory of its target.

    Raises: CheckpointError for a missing or wrong number, and for another kind of head.
    """
    file = Path(path) / "config.json"
    settings = EagleSettings(file, stored)
    settings.check()
    tensors = eagle_tensors(path)
    query, joined = (tensors.get(name) for name in (f"{FIRST_LAYER}self_attn.q_proj.weight", "fc.weight"))
    if query is None or joined is None or query.dim() != 2 or joined.dim() != 2:
        raise CheckpointError(f"{path} has no fc.weight and {FIRST_LAYER}self_attn.q_proj.weight, as EAGLE heads have")
    hidden = settings.size("hidden_size")
    is_eagle3 = query.shape[1] == 2 * hidden
    of_target = settings.size("target_hidden_size", hidden)
    if not is_eagle3 and of_target != hidden:
        raise CheckpointError(
            f"{file}: target_hidden_size is {of_target}, but a head of EAGLE-1 or EAGLE-2 reads its own outputs in the "
            f"target's place, which are {hidden} wide"
        )
    heads = settings.size("num_attention_heads")
    vocab_size = settings.size("vocab_size")
    num_layers = settings.size("num_hidden_layers", 1)
    layers = settings.feature_layers(joined.shape[1] // of_target, model) if is_eagle3 else LAST_STATE
    return EagleConfig(
        name=Path(path).resolve().name,
        is_eagle3=is_eagle3,
        hidden_size=hidden,
        target_hidden_size=of_target,
        intermediate_size=settings.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=settings.size("num_key_value_heads", heads),
        head_dim=settings.size("head_dim", hidden // heads),
        num_layers=num_layers,
        norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        vocab_size=vocab_size,
        draft_vocab_size=settings.size("draft_vocab_size", vocab_size),
        feature_layers=layers,
        windows=settings.windows(num_layers),
        rope=settings.rope(hidden, heads),
        are_layers_given=settings.get("feature_layers") is not None,
        norm_before_residual=bool(settings.get("norm_before_residual", settings.is_speculators)),
        norm_output=bool(settings.get("norm_output", False)),
        logit_scale=float(settings.get("logit_scale", 1.0)),
        mask_token=settings.mask_token(vocab_size, has_mask="mask_hidden" in tensors),
        names=frozenset(tensors),
    )


def eagle_tensors(path: str) -> dict[str, Tensor]:
    """All tensors that are read, by their common names."""
    return {_renamed(name): tensor for name, tensor in read_tensors(path).items() if not name.endswith(UNREAD)}


def load_tensors(config: EagleConfig, path: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a head that `read_eagle` accepts. Raises: CheckpointError for missing or damaged ones."""
    stored, wanted = eagle_tensors(path), dict(config.shapes())
    check_names(path, wanted, stored)
    check_tensors(path, wanted, stored)
    _check_borrowed(config, path)
    if "d2t" in stored:
        _check_tokens(config, path, stored["d2t"])
    return {name: tensor.to(device) if name == "d2t" else tensor.to(device, dtype) for name, tensor in stored.items()}


def _check_borrowed(config: EagleConfig, path: str) -> None:
    """Raises: CheckpointError if it lacks what a target of another width cannot lend."""
    lacking = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in config.names]
    if lacking and config.hidden_size != config.target_hidden_size:
        raise CheckpointError(f"{path} lacks {lacking[0]}, which a head of another width than its target needs")


def _check_tokens(config: EagleConfig, path: str, offsets: Tensor) -> None:
    """Raises: CheckpointError for a map to token ids that the target does not have."""
    token_ids = torch.arange(len(offsets)) + offsets.long()
    if (
        int(token_ids.min()) < 0
        or int(token_ids.max()) >= config.vocab_size
        or len({*token_ids.tolist()}) < len(offsets)
    ):
        raise CheckpointError(f"d2t in {path} is no map to different tokens of a vocabulary of {config.vocab_size}")


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    for other, own in RENAMED.items():
        if name.startswith(other):
            return own + name.removeprefix(other)
    return name
