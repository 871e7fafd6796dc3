"""Tiny random checkpoints of many families, each with a tokenizer: `write("llama", path)`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

from core.config import EngineConfig
from workers.model import loader
from workers.model.loader import LoadedModel, load
from workers.runtime.runtime import ModelRuntime

VOCAB_SIZE = 300
"""256 bytes, 43 merged pairs and <|end|>."""
EOS = VOCAB_SIZE - 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 4,  # padding rows, as real checkpoints have them
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "tie_word_embeddings": False,  # tied random embeddings repeat the last token for ever
    "initializer_range": 0.3,  # wide, so that attention matters and greedy choices are no near-ties
}
_GEMMA = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 24},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 5.0},
    "gemma3_text": _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {},
    "phi3": {},
    "gpt2": {},
}
"""Settings of each family beyond SIZES; the sliding windows are shorter than the contexts of the tests."""
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS | {"num_experts": 12},  # a name with 10 comes before one with 2
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 24},
    "glm4_moe": _ROUTED,
    "deepseek_v2": _ROUTED | _LATENT | {"head_dim": 8},
    "deepseek_v3": _ROUTED | _LATENT | {"head_dim": 8},
    "glm4_moe_lite": _ROUTED | _LATENT | {"head_dim": 8},
}
"""The same for mixtures of experts; the last three have latent attention."""
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_FEW_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_SMALL_LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA | _FEW_EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _FEW_EXPERTS,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4},
    "kimi_linear": _DELTA | _FEW_EXPERTS | _SMALL_LATENT,
    "bailing_hybrid": _DELTA | _FEW_EXPERTS | _SMALL_LATENT,
    "bamba": _MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA2 | _FEW_EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "lfm2": _CONV | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONV | _FEW_EXPERTS | {"num_dense_layers": 1},
    "lfm3": _CONV,
    "jamba": _FEW_EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "mamba": {"state_size": 8, "time_step_rank": 8},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1},
}
"""Families with recurrent layers: gated delta nets, Mamba-2, short convolutions and Mamba."""
_PAIR = {
    "vocab_size": VOCAB_SIZE + 4,
    "d_model": 32,
    "pad_token_id": 0,
    "eos_token_id": EOS,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
    "forced_eos_token_id": None,
    "init_std": 1.0,
    "max_position_embeddings": 256,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_T5 = {
    "vocab_size": VOCAB_SIZE + 4,
    "d_model": 32,
    "d_kv": 12,  # heads together are wider than the model, as in T5-3B
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,  # shorter than texts
    "eos_token_id": EOS,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_factor": 8.0,
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": _PAIR,
    "mbart": _PAIR | {"scale_embedding": True},
    "marian": _PAIR | {"decoder_vocab_size": VOCAB_SIZE + 4},
    "pegasus": _PAIR,
    "plbart": _PAIR,
}


@functools.cache
def tokenizer_json() -> str:
    """A byte-level tokenizer of VOCAB_SIZE ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlcu"
    pairs = [(a, b) for a in letters for b in letters if a != b][: EOS - len(alphabet)]
    vocab = {token: token_id for token_id, token in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer.to_str()


def build(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A model with random weights, float32, eager attention: what the runtime is compared with."""
    if family in ENCODER_DECODERS:
        kind, sizes = AutoModelForSeq2SeqLM, ENCODER_DECODERS[family]
    else:
        kind, sizes = AutoModelForCausalLM, SIZES | (FAMILIES | EXPERTS | RECURRENT).get(family, {})
    config = AutoConfig.for_model(family, **{**sizes, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind.from_config(config, attn_implementation="eager").eval()


def write(family: str, path: Path, seed: int = 0, **overrides: Any) -> Path:
    """The same model as a checkpoint at `path`: config, generation config, model.safetensors, tokenizer.json."""
    model = build(family, seed, **overrides)
    model.generation_config.eos_token_id = EOS
    transformers_logging.disable_progress_bar()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer_json())
    return path


def runtime(path: Path, **settings: Any) -> ModelRuntime:
    """The checkpoint at `path`, loaded; `settings` are those of EngineConfig."""
    config = EngineConfig(**{"model": str(path), "kv_cache_tokens": 4096} | settings)
    return ModelRuntime(load(config, lambda _: None), config)


@contextmanager
def read_once() -> Iterator[None]:
    """Meanwhile engines with the same settings get copies of one model. To read it takes six times as long."""
    with patch.object(loader, "load", _copied):
        yield


def _copied(config: EngineConfig, progress: Callable[[str], None]) -> LoadedModel:
    written = tuple(sorted(file.stat().st_mtime_ns for file in Path(config.model).iterdir()))
    loaded = _loaded(config, written)
    return replace(loaded, model=copy.deepcopy(loaded.model))


@functools.lru_cache(maxsize=8)
def _loaded(config: EngineConfig, _written: tuple[int, ...]) -> LoadedModel:
    """Some tests change a checkpoint that was read."""
    return load(config, lambda _: None)
