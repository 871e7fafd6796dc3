"""Finds the language model to serve in a checkpoint whose own class is not served as it is.

A multimodal model without images is its text tower, whose configuration and tensors it contains. Attention that is
chunked or indexed from some length on is full attention up to that length. Knows configurations and names of tensors;
must not know files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from core.errors import UnsupportedModel
from workers.model.contained.tower import tower_class

Rename: TypeAlias = Callable[[str], str | None]
"""Maps a stored tensor's name to the model's name for it; None if the model has no such tensor."""

TOWERS = frozenset({
    "exaone4_5", "gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "idefics2", "idefics3",
    "internvl", "kimi_k25", "lfm2_vl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl",
    "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
})  # fmt: skip
"""Multimodal model types whose text tower is compared with the whole model by the tests."""
INSIDE = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
BESIDE = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|vision_embedder|visual|multi_modal_projector|mm_projector|connector"
    r"|image_newline|embed_vision|embed_audio|audio_tower)\b"
)
"""Names of tensors of the language model, and of parts that only images and sounds pass through."""
HEAD = "ForConditionalGeneration"
"""How names of classes end that write text. What comes before it is not spelled alike everywhere."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id")
SAME_LAYERS: Mapping[str, str] = {"qwen3_vl_text": "qwen3"}
"""Towers without a tensor-parallel plan, and the type whose plan is theirs."""
UNINDEXED: Mapping[str, str] = {"deepseek_v32": "deepseek_v3", "glm_moe_dsa": "deepseek_v3"}
"""Model types in which an index chooses the keys that a row attends to, and the types that they are without it."""


@dataclass(frozen=True, slots=True)
class Contained:
    """The language model to serve."""

    config: Any
    rename: Rename | None = None
    """Its names for stored tensors; None if they are the same."""
    max_tokens: int | None = None
    """Context up to which it equals the checkpoint's own model; None if there is no such limit."""
    limit: str = ""
    """Why there is such a limit."""


def language_model(config: Any) -> Contained:
    """The language model in a checkpoint with this configuration; mostly the checkpoint itself.

    Raises: UnsupportedModel for a multimodal model without a text tower that can be served.
    """
    is_multimodal = config.get_text_config() is not config
    text, rename = (_text_config(config), tower_name) if is_multimodal else (config, None)
    if text.model_type == "llama4_text":
        return _unchunked(text, rename)
    if text.model_type in UNINDEXED:
        return _unindexed(text)
    return Contained(text, rename)


def tower_name(name: str) -> str | None:
    """A text tower's name for a tensor of a multimodal checkpoint, of any of the layouts in use."""
    if BESIDE.match(name):
        return None
    inner = INSIDE.sub("", name)
    return inner if inner == name or inner.startswith("lm_head.") else f"model.{inner}"


def _text_config(config: Any) -> Any:
    """Configuration of the text tower, with what the checkpoint states outside of it. Raises: UnsupportedModel."""
    kind = config.model_type
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if kind not in TOWERS or whole is None:
        raise UnsupportedModel(f"{kind} is multimodal, and its text tower has not been compared with the whole model")
    if config.architectures and not config.architectures[0].endswith(HEAD):
        raise UnsupportedModel(f"{kind} here is a {config.architectures[0]}, not a {whole.__name__}")
    text = deepcopy(config.get_text_config())
    text.tie_word_embeddings = config.tie_word_embeddings
    for name in SPECIAL_TOKENS:
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    if MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) is None:
        _register_tower(type(text), kind)
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]
    return text


def _register_tower(config_class: Any, whole: str) -> None:
    """Make transformers know a text tower that it has only inside of the multimodal model of type `whole`."""
    like = SAME_LAYERS.get(config_class.model_type)
    plan = {} if like is None else CONFIG_MAPPING[like].base_model_tp_plan
    tower = tower_class(config_class, MODEL_MAPPING[config_class], plan)
    AutoModelForCausalLM.register(config_class, tower, exist_ok=True)  # otherwise it leaves its own classes alone
    conversions = get_checkpoint_conversion_mapping(whole)
    if conversions is not None and get_checkpoint_conversion_mapping(config_class.model_type) is None:
        register_checkpoint_conversion_mapping(config_class.model_type, conversions)


def _unchunked(config: Any, rename: Rename | None) -> Contained:
    """Llama 4 within its first chunk, where queries are not scaled by position yet."""
    text = deepcopy(config)
    limits = [text.attention_chunk_size or text.max_position_embeddings]
    if text.attn_temperature_tuning:
        limits.append(text.floor_scale - 1)
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.attn_temperature_tuning = False
    return Contained(text, rename, min(limits), "its attention is in chunks, and its queries are scaled by position")


def _unindexed(config: Any) -> Contained:
    """The same model without its index: up to `index_topk` tokens the index chooses all of them."""
    dense = CONFIG_MAPPING[UNINDEXED[config.model_type]]
    values = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "layer_types")}
    text = dense.from_dict(values)
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[dense].__name__]
    return Contained(text, _unindexed_name, config.index_topk, "beyond it an index chooses the keys of each token")


def _unindexed_name(name: str) -> str | None:
    """None for tensors of the index."""
    return None if ".indexer." in name else name
