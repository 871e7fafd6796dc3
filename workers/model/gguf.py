"""Converts a GGUF file into a checkpoint directory: dequantized weights, configuration, tokenizer and chat template.

transformers reads the files (`modeling_gguf_pytorch_utils`, `integrations/gguf`), and it skips what it does not know: a
tensor, a scaling of the rotary embedding, a rule for splitting text. Each would change outputs without an error. So
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
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint as read_by_transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core.errors import CheckpointError, ConfigError, UnsupportedModel, cause
from workers.model.checkpoint import meta_model
from workers.model.folder import SINGLE
from workers.model.servable import check_architecture

STATEMENTS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
}
"""What a file says of its architecture, and where the configuration has the same. Other statements are refused."""
UNREAD = ("attention.key_length", "attn_logit_softcapping", "final_logit_softcapping")
"""Statements that transformers leaves out for some architectures."""
NO_SCALING = ("default", "none")
"""No scaling of the rotary embedding, as transformers and as GGUF say it."""
LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
"""Models of 27B scale attention in a way of their own."""
ARCHITECTURES = ("gemma2", "gemma3", "llama", "qwen2", "qwen3")
"""Architectures whose conversion is compared with the original model by the tests."""
GPT2_SPLITS = ("gpt-2", "mpt", "olmo", "jais")
DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r")
"""Rules for splitting text that transformers does not have, by llama.cpp's names: that of GPT-2, without and with each
digit on its own. Source: llama.cpp, src/llama-vocab.cpp."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with the factors by which Llama 3.1 and later divide rotary frequencies."""


def convert_gguf(file: Path, out: Path, dtype: str, progress: Callable[[str], None]) -> None:
    """Write the checkpoint of `file` into the directory `out`, with weights in `dtype`.

    Raises: ConfigError without the package gguf; CheckpointError for a damaged or incomplete file; UnsupportedModel
    for what transformers cannot read, and for what it would leave out.
    """
    metadata, tensors = _open(file)
    _check_kind(file, metadata)
    config = _read_config(file, metadata, tensors)
    model = meta_model(config, dtype)
    _check_names(file, model, metadata, tensors)
    tokenizer = _read_tokenizer(file, metadata)
    stored_bytes = sum(tensor.n_bytes for tensor in tensors.values())
    whole_bytes = sum(math.prod(tensor.shape) for tensor in tensors.values()) * getattr(torch, dtype).itemsize
    progress(
        f"{file} has {stored_bytes / 1e6:.0f} MB of weights; they are dequantized to {dtype}, which takes "
        f"{whole_bytes / 1e6:.0f} MB, in memory and on disk"
    )
    weights = _read_weights(file, model, dtype)
    vars(config).pop("_model_name_or_path", None)  # the file's title
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(out)
    GenerationConfig(**_token_ids(metadata)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    save_file(weights, out / SINGLE, metadata={"format": "pt"})
    (out / SINGLE).chmod((out / "config.json").stat().st_mode)  # safetensors lets nobody else read it


def _open(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file states, and its tensors. Raises: CheckpointError if it is no GGUF file or shorter than it says."""
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


def _read_config(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """The configuration, which says the same as the file. Raises: UnsupportedModel."""
    prefix = f"{metadata['general.architecture']}."
    stated = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    num_layers = stated.get("block_count")
    if not isinstance(num_layers, int) or num_layers > len(
        tensors
    ):  # so many would not even fit into memory without weights
        raise CheckpointError(f"{file} states block_count = {num_layers}, but has {len(tensors)} tensors")
    given = {STATEMENTS[key]: stated[key] for key in UNREAD if key in stated}
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True, **given)
    except Exception as error:  # configurations check their values themselves, and may raise anything
        raise UnsupportedModel(f"transformers cannot read the configuration of {file}: {cause(error)}") from error
    check_architecture(config)
    if config.model_type in LAYERS_OF_GEMMA_27B:
        config.query_pre_attn_scalar = _gemma_scale(config)
    if stated.get("rope.scaling.type") == "linear":
        _rope(config).update(rope_type="linear", factor=stated.get("rope.scaling.factor"))
    if ROPE_FACTORS in tensors:
        config.rope_parameters = _llama3_rope(file, config, tensors[ROPE_FACTORS])
    for key, value in ({"attention.sliding_window": None} | stated).items():
        _check_statement(file, config, key, value)
    return config


def _check_statement(file: Path, config: Any, key: str, value: Any) -> None:
    """Check that the configuration has this value, too. Raises: UnsupportedModel."""
    if key not in STATEMENTS:
        raise UnsupportedModel(f"{file} states {key} = {value}, which is not read here")
    name = STATEMENTS[key]
    if name == "head_dim":
        found = _head_dim(config)
    else:
        found = _rope(config).get(name) if key.startswith("rope.") else getattr(config, name, None)
    are_numbers = all(isinstance(each, int | float) for each in (found, value))
    if not (
        math.isclose(found, value, rel_tol=1e-6) if are_numbers else found == value or (found, value) == NO_SCALING
    ):
        raise UnsupportedModel(f"{file} states {key} = {value}, where transformers has {found}")


def _rope(config: Any) -> dict[str, Any]:
    """Parameters of the rotary embedding, in Gemma 3 of the layers without a window: a file has no others."""
    parameters: dict[str, Any] = config.rope_parameters
    found: dict[str, Any] = parameters.get("full_attention", parameters)
    return found


def _head_dim(config: Any) -> Any:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _gemma_scale(config: Any) -> Any:
    """The setting query_pre_attn_scalar, which no file has. Source: llama.cpp, src/models/gemma2.cpp and gemma3.cpp."""
    if config.num_hidden_layers == LAYERS_OF_GEMMA_27B[config.model_type]:
        return config.hidden_size // config.num_attention_heads
    return _head_dim(config)


def _llama3_rope(file: Path, config: Any, factors: Any) -> dict[str, Any]:
    """The parameters that give these factors. Raises: UnsupportedModel if those of Llama 3 do not."""
    wanted = torch.from_numpy(factors.data.copy()).float()
    parameters = {
        "rope_type": "llama3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": round(wanted.max().item(), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = type(config).from_dict(config.to_dict() | {"rope_parameters": parameters})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    plain = parameters["rope_theta"] ** -(torch.arange(0, 2 * len(frequencies), 2) / (2 * len(frequencies)))
    if len(frequencies) != len(wanted) or not torch.allclose(plain / frequencies, wanted, rtol=1e-4):
        raise UnsupportedModel(f"{file} scales rotary frequencies ({ROPE_FACTORS}) otherwise than Llama 3")
    return parameters


def _check_names(file: Path, model: Any, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Check that the file has all tensors of the model, and no others. Raises: CheckpointError."""
    names = _names(model, metadata["general.architecture"])
    tied = model.all_tied_weights_keys
    missing = sorted(name for name, own in names.items() if name not in tensors and own not in tied)
    left = sorted(tensors.keys() - names.keys() - {ROPE_FACTORS})
    for problem, found in (("lacks", missing), ("has no place in the model for", left)):
        if found:
            raise CheckpointError(f"{file} {problem} {len(found)} tensors, the first is {found[0]}")


def _names(model: Any, architecture: str) -> dict[str, str]:
    """The model's name for each tensor of a file."""
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    found: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    return found


def _read_weights(file: Path, model: Any, dtype: str) -> dict[str, Tensor]:
    """All weights, by the model's names. Raises: CheckpointError, UnsupportedModel."""
    try:
        read = read_by_transformers(
            str(file), return_tensors=True, model_to_load=model, torch_dtype=getattr(torch, dtype)
        )
    except NotImplementedError as error:  # a type that gguf cannot dequantize
        raise UnsupportedModel(f"{file} has weights that cannot be dequantized: {cause(error)}") from error
    except Exception as error:  # numpy's, of whatever does not fit
        raise CheckpointError(f"the weights of {file} are damaged: {cause(error)}") from error
    weights: dict[str, Tensor] = read["tensors"]
    wanted = model.state_dict()
    for name, weight in weights.items():
        if weight.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name} in {file} is {tuple(weight.shape)}, but its configuration says {tuple(wanted[name].shape)}"
            )
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
