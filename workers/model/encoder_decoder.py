"""Encoder-decoders, served as decoders: a sequence begins with its source, and the decoder's own text follows.

The KV of a source's tokens are the keys and values that cross-attention reads: the encoder's output, multiplied by the
weights of each layer of the decoder. They have the shapes of the decoder's own keys and values, so both are rows of one
sequence of KV. `SourceDecoder` replaces the model's `forward` by one for the rows of a step, and computes the rows of a
source. Knows modules of transformers; must not know KV, sessions or where rows are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import CausalLMOutput

from core.config import EngineConfig
from core.errors import UnsupportedModel
from workers.attention import DISTANCES, READS_SOURCE, WHOLE_TEXT

WITH_POSITIONS = frozenset({"bart", "marian", "mbart", "pegasus", "plbart"})
"""Model types that add an embedding of the position to that of the token."""
WITH_DISTANCES = frozenset({"mt5", "t5"})
"""Model types that add a bias to attention scores, by the distance between two tokens."""
NOT_APPLIED = (
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_decoder_ids",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "sequence_bias",
)
"""Settings of a generation config that change the output of `generate` and are not applied here."""
MAX_SOURCE_TOKENS = 2048
"""Longest source of a model that states no limit, unless a setting does. The bias of its encoder takes the square."""


def check_encoder_decoder(config: Any) -> None:
    """Raises: UnsupportedModel for an encoder-decoder that is not known to be computed exactly."""
    known = WITH_POSITIONS | WITH_DISTANCES
    if config.model_type not in known:
        raise UnsupportedModel(
            f"{config.model_type} is an encoder-decoder; of these {', '.join(sorted(known))} are served"
        )


def check_settings(architecture: str, config: EngineConfig) -> None:
    """Raises: UnsupportedModel for a setting that encoder-decoders are not served with."""
    settings = {
        "tensor_parallel": ("1", config.tensor_parallel == 1),
        "pipeline_parallel": ("1", config.pipeline_parallel == 1),
        "layers": ("absent", config.layers is None),
        "quantize": ("absent", config.quantize is None),
        "kv_dtype": ("absent", config.kv_dtype is None),
        "adapters": ("absent", not config.adapters),
        "head": ("absent", config.head is None),
        "feature_layers": ("absent", not config.feature_layers),
    }
    for name, (allowed, is_allowed) in settings.items():
        if not is_allowed:
            raise UnsupportedModel(f"{name} must be {allowed}: {architecture} is an encoder-decoder")


def start_tokens(model: Any) -> tuple[int, ...]:
    """Tokens that the decoder's text begins with: its start token and, if the model forces one, the first token.

    Raises: UnsupportedModel without a start token, or with a setting that would change the outputs.
    """
    settings, config = model.generation_config, model.config
    for name in NOT_APPLIED:
        if value := getattr(settings, name, None):
            raise UnsupportedModel(
                f"{config.model_type}: {name} is {value!r} in its generation config, which is not applied; remove it "
                "there to serve the model without it"
            )
    start = settings.decoder_start_token_id
    if start is None:
        start = getattr(config, "decoder_start_token_id", None)
    if not isinstance(start, int):
        raise UnsupportedModel(f"{config.model_type}: decoder_start_token_id must be a token id, got {start!r}")
    forced = settings.forced_bos_token_id
    return (start,) if forced is None else (start, forced)


def num_decoder_layers(config: Any) -> int:
    """Number of layers with KV."""
    names = ("num_decoder_layers", "decoder_layers") if config.is_encoder_decoder else ()
    return int(next((getattr(config, name) for name in names if hasattr(config, name)), config.num_hidden_layers))


def decoder_of(model: Any) -> SourceDecoder | None:
    """The decoder of a model that `serve_as_decoder` has changed; None for any other model."""
    found = vars(model).get("forward")
    return found if isinstance(found, SourceDecoder) else None


def serve_as_decoder(model: Any) -> None:
    """Change an encoder-decoder's `forward` to that of `SourceDecoder`. Leaves other models as they are."""
    if model.config.is_encoder_decoder:
        model.forward = SourceDecoder(model)


class SourceDecoder:
    """`forward` of an encoder-decoder for the rows of a step, and the rows of a source."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._cross = [module for module in self._decoder.modules() if _is_cross_attention(module)]
        for module in self._cross:
            setattr(module, READS_SOURCE, True)
        if model.config.model_type in WITH_DISTANCES:
            _use_distances(self._decoder)
        else:
            self._decoder.embed_positions.register_forward_pre_hook(self._give_positions, with_kwargs=True)
        self._positions: Tensor | None = None

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, plan: Any, use_cache: bool = False
    ) -> CausalLMOutput:
        """Logits of the rows to keep.  # [1, T], [1, T], [W]"""
        self._positions = position_ids[0]
        cache = _NoCache(self._cross)
        blank = cache.keys.new_zeros(1, 1, self._model.config.d_model)
        hidden = self._decoder(
            input_ids=input_ids, encoder_hidden_states=blank, past_key_values=cache, use_cache=use_cache, plan=plan
        ).last_hidden_state[:, logits_to_keep]
        if getattr(self._model.config, "scale_decoder_outputs", False):
            hidden = hidden * self._model.config.d_model**-0.5
        logits = self._model.lm_head(hidden)
        bias = getattr(self._model, "final_logits_bias", None)
        return CausalLMOutput(logits=logits if bias is None else logits + bias)

    def encode(self, source: Sequence[int]) -> Tensor:
        """The encoder's output.  # [S, d_model]"""
        ids = torch.tensor([list(source)], device=self._model.device)
        output: Tensor = self._model.get_encoder()(input_ids=ids, plan=WHOLE_TEXT).last_hidden_state[0]
        return output

    def source_rows(self, encoded: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Number, keys and values of each layer, for these rows of the encoder's output.  # [S, H, D]"""
        for module in self._cross:
            keys, values = (project(encoded) for project in _projections(module))
            shape = (len(encoded), _num_heads(module), -1)
            yield module.layer_idx, keys.view(shape), values.view(shape)

    def _give_positions(
        self,
        module: nn.Module,  # noqa: ARG002
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's own positions are those of one text in order."""
        return args, {**kwargs, "position_ids": self._positions}


class _Always:
    """Says of each layer that its keys and values are there."""

    def get(self, layer: int) -> bool:  # noqa: ARG002
        return True


class _NoCache(EncoderDecoderCache):  # type: ignore[misc]  # transformers is untyped
    """Given to the decoder in place of a cache: keys and values of cross-attention exist, those of the step are all.

    So the model's code computes neither; attention (`workers.attention`) reads KV.
    """

    def __init__(self, cross: Sequence[Any]) -> None:
        heads, dim = _num_heads(cross[0]), _projections(cross[0])[0].out_features // _num_heads(cross[0])
        weight = _projections(cross[0])[0].weight
        self.keys = self.values = weight.new_zeros(1, heads, 1, dim)
        self.is_updated = _Always()
        self.layers = [self] * len(cross)
        self.cross_attention_cache = self
        self.self_attention_cache = _OfStep()

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0


class _OfStep:
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _is_cross_attention(module: Any) -> bool:
    """T5 names its projections k and v, all others k_proj and v_proj."""
    return getattr(module, "is_causal", None) is False and (hasattr(module, "k") or hasattr(module, "k_proj"))


def _projections(attention: Any) -> tuple[Any, Any]:
    is_t5 = hasattr(attention, "k")
    return (attention.k, attention.v) if is_t5 else (attention.k_proj, attention.v_proj)


def _num_heads(attention: Any) -> int:
    return int(attention.n_heads if hasattr(attention, "n_heads") else attention.num_heads)


def _use_distances(decoder: Any) -> None:
    """Give the bias of each distance to all self-attention layers, and make the model's code compute none."""
    own = [module for module in decoder.modules() if getattr(module, "is_causal", False)]
    first = own[0]
    table = _table(first)
    for module in own:
        setattr(module, DISTANCES, table)
    first.compute_bias = _no_bias


@torch.inference_mode()
def _table(attention: Any) -> Tensor:
    """Bias of each head for each distance; all from `relative_attention_max_distance` on have the same.  # [H, D]"""
    most = attention.relative_attention_max_distance
    dense: Tensor = attention.compute_bias(1, most + 1, past_seen_tokens=most)  # of one row, for all keys up to its own
    return dense[0, :, 0].flip(1).contiguous()


def _no_bias(*_: Any, device: torch.device, **__: Any) -> Tensor:
    return torch.zeros(1, device=device)
