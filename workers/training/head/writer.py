"""Writes heads in the published formats of EAGLE-3 and Medusa, and their cards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.training.head.acceptance import Acceptance
from workers.training.head.eagle3 import HeadShape
from workers.training.head.features import tapped

EAGLE_ABOUT = """---
license: {license}
tags: [eagle3, speculative-decoding]
---
# An EAGLE-3 head for {target}

One decoder layer that guesses what {target} says, from hidden states of three of its layers (the inputs of layers
{layers}). Embeddings are the target's{borrowed}. {num_draft} of its {num_vocab} tokens can be guessed.
"""
MEDUSA_ABOUT = """---
license: {license}
tags: [medusa, speculative-decoding]
---
# Medusa heads for {target}

{unrolled} heads (Medusa-1) that guess the tokens after the next one from the last hidden state of {target}: each a
residual layer and an output layer of its own.
"""
CARD = """
Made by `{command}`

{num_texts} texts with {num_tokens} guessed tokens were trained on; each twentieth text was held out. {steps} steps,
chains of {unrolled}. The figures are those of the held-out texts, measured offline by passes over whole texts in which
all guesses of a chain are compared with the text. At a temperature, target and head draw with shared noise.

| texts | T | tokens | right by depth, after a right prefix | tokens a round, chain of 1, 2, ... | tree of 16 |
| --- | --- | --- | --- | --- | --- |
{rows}
"""


def write_head(folder: Path, shape: HeadShape, target: Any, tensors: Mapping[str, Tensor], vocabulary: Sequence[int],
               output: Tensor | None) -> None:  # fmt: skip
    """Write config.json and model.safetensors. `target`: the target's configuration; `output`: rows of its output layer
    for the draft's vocabulary, or None for a head that borrows them."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    if output is not None:
        stored["lm_head.weight"] = output.detach().to("cpu", torch.bfloat16).contiguous()
    chosen = torch.tensor(vocabulary)
    stored["d2t"] = chosen - torch.arange(len(chosen))
    stored["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape, target, len(vocabulary)), indent=2) + "\n")


def _config(shape: HeadShape, target: Any, num_draft: int) -> dict[str, Any]:
    """`feature_layers` is this server's key. No other layer ids: other servers count them from 0 or 1, and agree on the
    usual layers where a file has none."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "feature_layers": list(tapped(target.num_hidden_layers)),
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": num_draft,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        "torch_dtype": "bfloat16",
    }


def write_medusa(folder: Path, tensors: Mapping[str, Tensor], num_heads: int, target: str) -> None:
    """Write config.json and medusa_lm_head.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "medusa_lm_head.safetensors", metadata={"format": "pt"})
    config = {"base_model_name_or_path": target, "medusa_num_heads": num_heads, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_card(folder: Path, found: Mapping[tuple[str, float], Acceptance], is_eagle: bool, **facts: Any) -> None:
    """Write README.md. `found`: by kind of text and temperature; `facts`: the other fields of the card."""
    rows = [
        f"| {kind} | {temperature:g} | {each.num_tokens} | {_figures(each.by_depth)} | {_figures(each.chains)}"
        f" | {each.tree:.2f} |"
        for (kind, temperature), each in found.items()
    ]
    about = EAGLE_ABOUT if is_eagle else MEDUSA_ABOUT
    (folder / "README.md").write_text((about + CARD).format(rows="\n".join(rows), **facts))


def _figures(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
