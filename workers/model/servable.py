"""Checks that the runtime computes a model exactly: by its configuration, then by a small forward pass.

Knows architectures, and what attention over block KV and rollback by length require of them. Must not know files.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from core.config import EngineConfig
from core.errors import UnsupportedModel
from workers.attention import LayerProbe
from workers.model.encoder_decoder import MAX_SOURCE_TOKENS, check_encoder_decoder, num_decoder_layers
from workers.recurrent import find_mixers, keeps_states
from workers.step import LayerShape

RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid"}
"""Types of layers that have a recurrent mixer, beside attention or in its place."""
STATELESS_LAYERS = {"moe", "mlp"}
SERVABLE_LAYERS = {"full_attention", "sliding_attention"} | RECURRENT_LAYERS | STATELESS_LAYERS
ROPE_OF_THE_BATCH = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies change for the whole batch once any sequence exceeds the original context."""

PROBE_TOKENS = 4
WINDOW_MASK = "create_sliding_window_causal_mask"
"""Modelling code that builds window masks imports this function."""

DEFAULT_CONTEXT = 32_768
"""Context of a model that does not state its own, if no setting limits it; in tokens."""


def check_architecture(config: Any) -> None:
    """Raises: UnsupportedModel for an architecture that the attention interface does not support."""
    kind = config.model_type
    if config.is_encoder_decoder:
        check_encoder_decoder(config)
    model_class = class_of(config)
    if model_class is None:
        raise UnsupportedModel(f"{kind} is not a causal language model")
    if config.architectures and model_class.__name__ not in config.architectures:
        raise UnsupportedModel(f"{kind} here is a {config.architectures[0]}, not a {model_class.__name__}")
    if config.is_encoder_decoder:
        return
    code = sys.modules[model_class.__module__]
    is_recurrent = keeps_states(code)
    if getattr(model_class, "_is_stateful", False) and not is_recurrent:
        raise UnsupportedModel(
            f"{kind} keeps the state of its recurrent layers outside of transformers' cache, so that it cannot be "
            "rolled back after a rejected guess"
        )
    if not model_class._supports_attention_backend and not is_recurrent:  # recurrent classes leave the flag out
        raise UnsupportedModel(f"{kind} does not hand its attention to a backend, so the block KV cache cannot be used")
    directions = getattr(config, "use_bidirectional_attention", None)
    if not getattr(config, "is_causal", True) or directions not in (None, False, "vision"):  # text has one direction
        raise UnsupportedModel(f"{kind} is configured to attend in both directions")
    foreign = set(getattr(config, "layer_types", None) or ()) - SERVABLE_LAYERS
    if foreign:
        raise UnsupportedModel(
            f"{kind} has layers of type {', '.join(sorted(foreign))}, which cannot be rolled back by length"
        )


def class_of(config: Any) -> Any:
    """The class of transformers for a language model with this configuration; None without one."""
    classes = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
    return classes.get(type(config), None)


def check_recurrent(model: Any, config: Any, num_ranks: int) -> None:
    """Check where the model, which may lack weights, keeps its states. Raises: UnsupportedModel."""
    mixers = {module.layer_idx for _, module in find_mixers(model)}
    if mixers and num_ranks > 1:
        raise UnsupportedModel(
            f"{config.model_type} has recurrent layers, which are served by one rank only: set tensor_parallel and "
            "pipeline_parallel to 1"
        )
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind in RECURRENT_LAYERS and layer not in mixers:
            raise UnsupportedModel(
                f"layer {layer} of {config.model_type} is of type {kind} and keeps its state outside of transformers' "
                "cache, so that it cannot be rolled back after a rejected guess"
            )


def context_limit(model_config: Any, config: EngineConfig, max_tokens: int | None = None) -> int:
    """Number of positions that may be used; at most `max_tokens`.

    Dynamic and longrope embeddings have fixed frequencies up to the original context. Above it the frequencies would
    depend on the longest sequence of the batch, so such a model is served up to the original context only.
    Raises: UnsupportedModel if the settings ask for more.
    """
    limit = getattr(model_config, "max_position_embeddings", None) or config.kv_cache_tokens or DEFAULT_CONTEXT
    limit = min(limit, max_tokens or limit)
    for rope in _rope_parameters(model_config):
        if rope.get("rope_type") in ROPE_OF_THE_BATCH:
            limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    wanted = config.max_context_tokens
    if wanted is not None and wanted > limit:
        raise UnsupportedModel(
            f"max_context_tokens is {wanted}, but {config.model} can be served exactly up to {limit}"
        )
    return wanted or limit


def source_limit(model_config: Any, config: EngineConfig, max_context: int) -> int:
    """Longest source of an encoder-decoder whose decoder is served up to `max_context` positions."""
    is_limited = getattr(model_config, "max_position_embeddings", None) or config.max_context_tokens
    return max_context if is_limited else min(max_context, MAX_SOURCE_TOKENS)


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Parameters for each kind of layer; most models have one kind."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (kind for kind in parameters.values() if isinstance(kind, dict))


@torch.inference_mode()
def probe_layers(
    model: Any, config: Any, recurrent: Collection[int] = (), own: range | None = None
) -> tuple[LayerShape, ...]:
    """Find what each layer's attention stores by a small forward pass. `recurrent`: layers with recurrent mixers.
    `own`: the layers that the model has, if it is one stage of several.

    Raises: UnsupportedModel if a layer misuses the attention interface.
    """
    probe, device = LayerProbe(), model.device
    rows = torch.arange(PROBE_TOKENS, device=device)[None]
    model(input_ids=torch.zeros_like(rows), position_ids=rows, use_cache=False, logits_to_keep=rows[0], plan=probe)
    kinds = dict(enumerate(getattr(config, "layer_types", None) or ()))
    stateless = {layer for layer, kind in kinds.items() if kind in STATELESS_LAYERS}
    num_layers = num_decoder_layers(config)
    own = range(num_layers) if own is None else own
    if {*probe.shapes, *recurrent} | stateless.intersection(own) != {*own}:
        raise UnsupportedModel(
            f"{config.model_type} uses attention in {len(probe.shapes)} of its {num_layers} layers; "
            "the state of the others cannot be rolled back"
        )
    for layer, kind in kinds.items():
        if kind == "sliding_attention" and layer in own and probe.windows[layer] is None:
            raise UnsupportedModel(
                f"layer {layer} of {config.model_type} does not tell its sliding window to its attention"
            )
    _check_windows(model, config, tells_window=any(window is not None for window in probe.windows.values()))
    return tuple(probe.shapes.get(layer, LayerShape()) for layer in range(num_layers))


def _check_windows(model: Any, config: Any, *, tells_window: bool) -> None:
    """Check that attention calls and masks agree on whether there is a window.

    Our attention uses the window that a layer passes; eager code uses the mask that the model makes. Models whose
    config lists layer types have been checked already.
    Raises: UnsupportedModel if only one of the two has a window.
    """
    window = getattr(config, "sliding_window", None)
    makes_mask = hasattr(sys.modules[type(model).__module__], WINDOW_MASK)
    is_reached = window is not None and window < (getattr(config, "max_position_embeddings", None) or math.inf)
    if is_reached and not getattr(config, "layer_types", None) and tells_window != makes_mask:
        has, has_not = ("attention", "mask") if tells_window else ("mask", "attention")
        raise UnsupportedModel(
            f"{config.model_type} has a sliding window of {window} in its {has}, but not in its {has_not}: "
            "it cannot be computed exactly"
        )
