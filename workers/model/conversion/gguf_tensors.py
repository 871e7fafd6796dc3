"""Tensors of a GGUF file by the model's names for them, dequantized, and as the model has them.

transformers knows this in two ways: by patterns with conversions (`integrations/gguf`) for new architectures, and by
the package gguf's names with a processor (`modeling_gguf_pytorch_utils`) for others. Must not know configurations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf import GGUF_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

MORE_TOKENS = "mtp."
"""transformers' prefix of layers that predict several tokens at once. Its models do not load them."""


@dataclass(slots=True)
class Source:
    """The source of one of the model's tensors."""

    converter: WeightConverter | None = None
    names: dict[str, str] = field(default_factory=dict)
    """Names in the file by the converter's patterns."""

    @property
    def is_whole(self) -> bool:
        return self.converter is None or len(self.names) == len(self.converter.source_patterns)

    def converted(self, tensors: Mapping[str, Any], target: str) -> Tensor:
        """Read and convert the tensors."""
        read = {pattern: torch.from_numpy(_dequantized(tensors[name])) for pattern, name in self.names.items()}
        for step in self.converter.operations if self.converter is not None else ():
            patterns = self.converter.source_patterns  # type: ignore[union-attr]
            ordered = {pattern: read[pattern] for pattern in patterns if pattern in read} or read
            read = step.convert(ordered, source_patterns=list(ordered), target_patterns=[target])
        [value] = read.values()
        return value


def misplaced(
    model: Any, architecture: str, stored: Iterable[str], *, may_predict_more: bool
) -> tuple[list[str], list[str]]:
    """The tensors that the file lacks, by one of their names, and those that the model has no place for.

    `may_predict_more` says whether the file may have layers that predict several tokens at once.
    """
    wanted, tied = model.state_dict(), model.all_tied_weights_keys
    if architecture in GGUF_ARCHS:
        sources = _sources(model, architecture, stored)
        whole = {name for name, source in sources.items() if source.is_whole}
        missing = sorted(wanted.keys() - whole - tied.keys())
        ignored = (MORE_TOKENS,) if may_predict_more else ()
        foreign = [name for name in sources if name not in wanted and not name.startswith(ignored)]
        return missing, sorted(name for own in foreign for name in sources[own].names.values())
    names = names_of(model, architecture)
    missing = sorted(name for name, own in names.items() if name not in set(stored) and own not in tied)
    return missing, sorted(set(stored) - names.keys())


def read_weights(model: Any, architecture: str, tensors: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights, by the model's names; each is in `dtype` before the next is read."""
    if architecture not in GGUF_ARCHS:
        return _processed(model, architecture, tensors, dtype)
    wanted = model.state_dict()
    sources = _sources(model, architecture, tensors)
    return {name: source.converted(tensors, name).to(dtype) for name, source in sources.items() if name in wanted}


def _sources(model: Any, architecture: str, stored: Iterable[str]) -> dict[str, Source]:
    """The source of each tensor, by its name in the model."""
    conversions = GGUF_ARCHS[architecture](model.config)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Source] = defaultdict(Source)
    for name in stored:
        own, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, model.state_dict())
        found[own].converter = by_pattern[pattern] if pattern is not None else None
        found[own].names[pattern or name] = name
    return found


def names_of(model: Any, architecture: str) -> dict[str, str]:
    """The model's name for each tensor of a file, by the package gguf's names."""
    found: dict[str, str] = get_gguf_hf_weights_map(model, _processor(model, architecture))
    return {f"{name}.weight" if name.endswith("_exps") else name: own for name, own in found.items()}


def _processor(model: Any, architecture: str) -> TensorProcessor:
    """Undoes what llama.cpp does to some tensors of an architecture."""
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())


def _processed(model: Any, architecture: str, tensors: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    processor = _processor(model, architecture)
    names = get_gguf_hf_weights_map(model, processor)
    held: dict[str, dict[str, Tensor]] = {"tensors": {}}
    weights = held["tensors"]  # to which processors add experts, of which several tensors make one
    for tensor in tensors.values():
        values = _dequantized(tensor)
        part = processor.process(values, tensor.name, tensor_key_mapping=names, parsed_parameters=held)
        if part.name in names:
            weights[names[part.name]] = torch.from_numpy(np.array(part.weights))
        weights.update({name: value.to(dtype) for name, value in weights.items() if value.dtype != dtype})
    return weights


def _dequantized(tensor: Any) -> Any:
    from gguf import dequantize  # an optional package

    return np.array(dequantize(tensor.data, tensor.tensor_type))
