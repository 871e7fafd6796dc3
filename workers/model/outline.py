"""Reads a config.json alone: whether the model can be served, and the shapes that determine memory and time.

Needs no weights, no tokenizer and no memory to speak of. What only the files show is not checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.config import EngineConfig
from core.costs import KVShape, ModelShape
from core.errors import UnsupportedModel, cause
from workers.attention import keep_latents
from workers.model.checkpoint import meta_model
from workers.model.contained import language_model
from workers.model.encoder_decoder import serve_as_decoder
from workers.model.folder import quiet_transformers, read_config
from workers.model.servable import check_architecture, check_recurrent, context_limit, probe_layers
from workers.model.shards import ModelShard, PipelineStage
from workers.recurrent import find_mixers, state_bytes
from workers.step.kv_dtype import kv_dtype

TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token")
"""Names of the number of experts that a row uses."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without weights."""

    architecture: str
    shape: ModelShape
    max_context_tokens: int
    limit: str
    """Why that is less than the checkpoint's own context; empty if it is not."""
    is_quantized: bool
    """Whether the checkpoint's weights are stored in fewer bits. They are dequantized when they are loaded."""


def outline_of(config: EngineConfig) -> Outline:
    """The model whose config.json `config.model` is, or is the directory of.

    Raises: CheckpointError; UnsupportedModel for a model that is refused by its configuration, or cannot be split over
    `config.tensor_parallel` ranks.
    """
    with quiet_transformers():
        return _outline(config)


def _outline(config: EngineConfig) -> Outline:
    read, scaled = read_config(Path(config.model))
    contained = language_model(read)
    model_config = contained.config
    check_architecture(model_config)
    max_context = context_limit(model_config, config, contained.max_tokens)
    try:
        model = meta_model(model_config, config.dtype).eval()
    except Exception as error:  # the model's own code may raise anything
        raise UnsupportedModel(f"transformers cannot build the {model_config.model_type}: {cause(error)}") from error
    check_recurrent(model, model_config, config.num_ranks)
    PipelineStage(0, config.pipeline_parallel).check(model)
    if config.tensor_parallel > 1:
        ModelShard(0, config.tensor_parallel, config.expert_parallel).check(model_config)
    return Outline(type(model).__name__, _shape(model, config), max_context, contained.limit, scaled is not None)


def _shape(model: Any, config: EngineConfig) -> ModelShape:
    experts = [value for name, value in model.named_parameters() if ".experts." in name]
    widest = max((value.shape[0] for value in experts), default=1)
    top_k = next((getattr(model.config, name) for name in TOP_K if getattr(model.config, name, None)), widest)
    num_parameters = sum(value.numel() for value in model.parameters())
    keep_latents(model)  # which makes other weights of some
    serve_as_decoder(model)
    recurrent: set[Any] = {module.layer_idx for _, module in find_mixers(model)}
    layers = probe_layers(model, model.config, recurrent)
    dtype = getattr(torch, config.dtype)
    return ModelShape(
        num_parameters=num_parameters,
        num_expert_parameters=sum(value.numel() for value in experts),
        expert_share=min(1.0, top_k / widest),
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        layers=tuple(KVShape(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in layers),
        value_bytes=dtype.itemsize,
        state_bytes=state_bytes(model),
        kv_value_bytes=kv_dtype(config, dtype).itemsize,
    )
