"""Converts a GGUF file into a checkpoint directory: dequantized weights, configuration, tokenizer and chat template.

transformers knows the names and layouts of tensors (`modeling_gguf_pytorch_utils`), and it skips what it does not know:
a tensor, a scaling of the rotary embedding, a rule for splitting text. Each would change outputs without an error. So
everything that a file states must be in the result, or the file is refused. Must not know how checkpoints are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from core.errors import CheckpointError, ConfigError, UnsupportedModel, cause
from workers.model.checkpoint import meta_model
from workers.model.conversion.gguf_config import ARCHITECTURES, ROPE_FACTORS, read_config
from workers.model.conversion.gguf_tensors import misplaced, read_weights
from workers.model.folder import SINGLE

GPT2_SPLITS = ("gpt-2", "mpt", "olmo", "jais")
DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r")
"""Rules for splitting text that transformers does not have, by llama.cpp's names: that of GPT-2, without and with each
digit on its own. Source: llama.cpp, src/llama-vocab.cpp."""


def convert_gguf(file: Path, out: Path, dtype: str, progress: Callable[[str], None]) -> None:
    """Write the checkpoint of `file` into the directory `out`, with weights in `dtype`.

    Raises: ConfigError without the package gguf; CheckpointError for a damaged or incomplete file; UnsupportedModel
    for what transformers cannot read, and for what it would leave out.
    """
    metadata, tensors = _open(file)
    _check_kind(file, metadata)
    config = read_config(file, metadata, tensors)
    model = meta_model(config, dtype)
    _check_names(file, model, metadata, tensors)
    tokenizer = _read_tokenizer(file, metadata)
    stored_bytes = sum(tensor.n_bytes for tensor in tensors.values())
    whole_bytes = sum(math.prod(tensor.shape) for tensor in tensors.values()) * getattr(torch, dtype).itemsize
    progress(
        f"{file} has {stored_bytes / 1e6:.0f} MB of weights; they are dequantized to {dtype}, which takes "
        f"{whole_bytes / 1e6:.0f} MB, in memory and on disk"
    )
    weights = _read_weights(file, model, metadata["general.architecture"], tensors, dtype)
    vars(config).pop("_model_name_or_path", None)  # the file's title
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(out)
    GenerationConfig(**_token_ids(metadata)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    save_file(weights, out / SINGLE, metadata={"format": "pt"})
    (out / SINGLE).chmod((out / "config.json").stat().st_mode)  # safetensors lets nobody else read it


def _open(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file's metadata and tensors. Raises: CheckpointError if it is no GGUF file, or shorter than its header says."""
    try:
        from gguf import GGUFReader  # an optional package
    except ImportError as error:
        raise ConfigError("reading GGUF files needs the package gguf: pip install 'outrider[gguf]'") from error
    try:
        reader = GGUFReader(file)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # it checks nothing, so that a damaged header may raise anything
        raise CheckpointError(f"{file} is no GGUF file, or is damaged or incomplete: {cause(error)}") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _check_kind(file: Path, metadata: Mapping[str, Any]) -> None:
    """Raises: CheckpointError for a file that is no whole model; UnsupportedModel for another architecture."""
    if (kind := metadata.get("general.type", "model")) != "model":
        raise CheckpointError(f"{file} is of type {kind!r}, not a model")
    if (num_parts := metadata.get("split.count", 1)) not in (0, 1):
        raise CheckpointError(f"{file} is one of {num_parts} parts; join them first: llama-gguf-split --merge")
    if (architecture := metadata.get("general.architecture")) not in ARCHITECTURES:
        raise UnsupportedModel(f"{file} is of architecture {architecture!r}; {', '.join(ARCHITECTURES)} are converted")


def _check_names(file: Path, model: Any, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Check that the file has all tensors of the model, and no others. Raises: CheckpointError."""
    architecture = metadata["general.architecture"]
    may_predict_more = bool(metadata.get(f"{architecture}.nextn_predict_layers"))
    stored = [name for name in tensors if name not in ROPE_FACTORS.get(architecture, ())]
    missing, left = misplaced(model, architecture, stored, may_predict_more=may_predict_more)
    for problem, found in (("lacks", missing), ("has no place in the model for", left)):
        if found:
            raise CheckpointError(f"{file} {problem} {len(found)} tensors, the first is {found[0]}")


def _read_weights(
    file: Path, model: Any, architecture: str, tensors: Mapping[str, Any], dtype: str
) -> dict[str, Tensor]:
    """All weights, by the model's names. Raises: CheckpointError, UnsupportedModel."""
    try:
        weights = read_weights(model, architecture, tensors, getattr(torch, dtype))
    except NotImplementedError as error:  # a type that gguf cannot dequantize
        raise UnsupportedModel(f"{file} has weights that cannot be dequantized: {cause(error)}") from error
    except Exception as error:  # numpy's, of whatever does not fit
        raise CheckpointError(f"the weights of {file} are damaged: {cause(error)}") from error
    wanted = model.state_dict()
    for name, weight in weights.items():
        if weight.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name} in {file} is {tuple(weight.shape)}, but its configuration says {tuple(wanted[name].shape)}"
            )
        if not weight.isfinite().all():
            raise CheckpointError(f"{name} in {file} has a value that is NaN or infinite")
    return {name: weight.contiguous() for name, weight in weights.items()}


def _read_tokenizer(file: Path, metadata: Mapping[str, Any]) -> Any:
    """The tokenizer with its chat template. Raises: CheckpointError, UnsupportedModel."""
    split = metadata.get("tokenizer.ggml.pre")
    is_byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    known = {*GGUF_PRE_TOKENIZER_SPLITS, *GPT2_SPLITS, *DIGIT_SPLITS}
    if is_byte_level and split not in known:
        raise UnsupportedModel(
            f"{file} splits text by the rule {split!r} (tokenizer.ggml.pre), which is not known here"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"the tokenizer of {file} cannot be read: {cause(error)}") from error
    if is_byte_level and split in DIGIT_SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of generation_config.json. Chats end by a token of their own in some models (eot)."""
    ids = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot")}
    ends = [token_id for token_id in dict.fromkeys((ids["eos"], ids["eot"])) if token_id is not None]
    return {"bos_token_id": ids["bos"], "eos_token_id": ends or None}
