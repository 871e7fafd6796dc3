"""Grows a small Llama checkpoint into a larger one that computes the same function.

    python -m bench.models.grow --model models/demo/target --size 123M --out DIR

Benchmarks then have the acceptance of two trained models at the cost of large ones. Knows the tensors of a Llama; must
not know the engine: any engine that reads safetensors can run the result.

How the function is preserved, with d hidden dimensions in the source and D in the grown model:

- The residual stream is the old one followed by D - d zeros. RMSNorm then divides by a root mean square that is smaller
  by sqrt(d/D). Its weights are scaled to compensate, and eps is multiplied by d/D.
- Added parts do real work and output zero. New heads and new units of an MLP read, through `v_proj` and `up_proj`, only
  the zeros of the stream. Their output is therefore exactly zero, whatever the other matrices hold (`q_proj`, `k_proj`,
  `gate_proj`; `o_proj`, `down_proj`). Added layers consist of such heads and units.
- Query heads added to an old key-value head are copies of its old ones, and each writes an equal share of the output.
- Everything else is filled with random numbers, so that no library can skip zero matrices or rows. (If the width stays
  the same there are no zeros to read; then `v_proj` and `up_proj` of added parts are zero.)

If D is d times a power of four, the factor is a power of two, and the weights are exact in bfloat16, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.models.sizes import SIZES, CannotGrow, Shape, Size, parse_size, read_shape, shape_of_size
from core.config import Dtype

FORMAT = 1
"""Version of grown weights, a part of the cache's names. Increase it when the same settings give other weights."""
FILLER_STD = 0.02
DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "outrider" / "grown"
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
INDEX = "model.safetensors.index.json"


def grow(source: Path, out: Path, shape: Shape, dtype: Dtype = "bfloat16", seed: int = 0) -> None:
    """Write the checkpoint `source` in the larger `shape` to `out`, with one layer in memory at a time.

    Raises: CannotGrow.
    """
    config = json.loads((source / "config.json").read_text())
    _check(config, Shape.of(config), shape)
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    builder = _Builder(load_file(source / "model.safetensors"), Shape.of(config), shape, getattr(torch, dtype), seed)
    _write_weights(unfinished, builder.shards())
    (unfinished / "config.json").write_text(json.dumps(_config(config, shape, dtype), indent=2) + "\n")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, unfinished / name)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)


def cached(source: Path, shape: Shape, dtype: Dtype, directory: Path, seed: int = 0) -> Path:
    """Return the grown checkpoint below `directory`, named after its contents; grow it if it does not exist."""
    settings = json.dumps([FORMAT, asdict(shape), dtype, seed, FILLER_STD], sort_keys=True)
    digest = hashlib.sha256(settings.encode())
    for name in ("config.json", "model.safetensors", *COPIED):
        if (source / name).is_file():
            digest.update((source / name).read_bytes())
    out = directory / f"{source.name}-{shape.num_parameters / 1e6:.0f}M-{dtype}-{digest.hexdigest()[:12]}"
    if not out.is_dir():
        grow(source, out, shape, dtype, seed)
    return out


def _check(config: Mapping[str, Any], source: Shape, shape: Shape) -> None:
    is_plain = config.get("model_type") == "llama" and config.get("hidden_act") == "silu"
    if not is_plain or config.get("attention_bias") or config.get("mlp_bias"):
        raise CannotGrow("only a Llama without biases is grown")
    if config.get("tie_word_embeddings") is not True:
        raise CannotGrow("the source must have tied embeddings")
    if (shape.head_dim, shape.vocab_size) != (source.head_dim, source.vocab_size):
        raise CannotGrow("the size of a head and the vocabulary stay what they are")
    if any(getattr(shape, name) < getattr(source, name) for name in Shape.__slots__):
        raise CannotGrow(f"{shape} does not contain {source}")
    if shape.hidden_size % shape.num_attention_heads:
        raise CannotGrow("the number of query heads must divide the width")
    if shape.num_attention_heads % shape.num_key_value_heads or shape.group % source.group:
        raise CannotGrow(f"query heads to a key-value head must be a multiple of the source's {source.group}")


def _config(config: Mapping[str, Any], shape: Shape, dtype: Dtype) -> dict[str, Any]:
    eps = config["rms_norm_eps"] * config["hidden_size"] / shape.hidden_size
    return {**config, **asdict(shape), "rms_norm_eps": eps, "tie_word_embeddings": False, "dtype": dtype}


def _write_weights(folder: Path, shards: Iterator[dict[str, Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(shards):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class _Builder:
    """Builds the tensors of the grown model layer by layer. Old rows and columns come first."""

    def __init__(
        self, tensors: Mapping[str, Tensor], source: Shape, shape: Shape, dtype: torch.dtype, seed: int
    ) -> None:
        self._tensors = tensors
        self._source, self._shape = source, shape
        self._dtype = dtype
        self._seed = seed
        self._norm_scale = math.sqrt(source.hidden_size / shape.hidden_size)

    def shards(self) -> Iterator[dict[str, Tensor]]:
        yield self._ends()
        for layer in range(self._shape.num_hidden_layers):
            yield self._layer(f"model.layers.{layer}.", is_new=layer >= self._source.num_hidden_layers)

    def _ends(self) -> dict[str, Tensor]:
        """Embedding, last norm and output matrix. New dimensions are zero in the embedding and random in the output
        matrix."""
        old = self._tensors["model.embed_tokens.weight"]
        size = (self._shape.vocab_size, self._shape.hidden_size)
        embedding = torch.zeros(size, dtype=self._dtype)
        embedding[:, : self._source.hidden_size] = old
        return {
            "model.embed_tokens.weight": embedding,
            "lm_head.weight": self._matrix("lm_head.weight", size, old),
            "model.norm.weight": self._norm(self._tensors["model.norm.weight"]),
        }

    def _layer(self, prefix: str, *, is_new: bool) -> dict[str, Tensor]:
        width, num_units = self._shape.hidden_size, self._shape.intermediate_size
        num_queries, num_keys = self._shape.num_query_rows, self._shape.num_key_rows
        old = {} if is_new else self._old_matrices(prefix)
        source_width = self._source.hidden_size  # number of dimensions of the stream that are not zero
        sizes = {  # rows, columns, number of first columns that are zero in new rows
            "self_attn.q_proj": (num_queries, width, 0),
            "self_attn.k_proj": (num_keys, width, 0),
            "self_attn.v_proj": (num_keys, width, source_width),
            "self_attn.o_proj": (width, num_queries, 0 if is_new else old["self_attn.o_proj"].shape[1]),
            "mlp.gate_proj": (num_units, width, 0),
            "mlp.up_proj": (num_units, width, source_width),
            "mlp.down_proj": (width, num_units, 0 if is_new else old["mlp.down_proj"].shape[1]),
        }
        layer = {}
        for name, (rows, columns, num_zeroed) in sizes.items():
            full_name = f"{prefix}{name}.weight"
            layer[full_name] = self._matrix(full_name, (rows, columns), old.get(name), num_zeroed)
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[f"{prefix}{name}.weight"] = self._norm(self._tensors.get(f"{prefix}{name}.weight"))
        return layer

    def _old_matrices(self, prefix: str) -> dict[str, Tensor]:
        """Matrices of a source layer, with query heads copied until the number per key-value head matches.

        A copy attends like its original, and each copy writes an equal share of the original's output.
        """
        old = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }
        num_copies, head_dim = self._shape.group // self._source.group, self._shape.head_dim
        queries, output = old["self_attn.q_proj"], old["self_attn.o_proj"]
        heads = torch.arange(queries.shape[0]).view(-1, head_dim).repeat_interleave(num_copies, 0).flatten()
        return old | {"self_attn.q_proj": queries[heads], "self_attn.o_proj": output[:, heads].float() / num_copies}

    def _matrix(self, name: str, size: tuple[int, int], old: Tensor | None, num_zeroed: int = 0) -> Tensor:
        """Random numbers with the old weights in the upper left corner. New rows are zero in the first `num_zeroed`
        columns."""
        grown = self._filler(name, size)
        grown[:, :num_zeroed] = 0
        if old is not None:
            grown[: old.shape[0], : old.shape[1]] = old
        return grown

    def _norm(self, old: Tensor | None) -> Tensor:
        grown = torch.full((self._shape.hidden_size,), self._norm_scale)
        if old is not None:
            grown[: len(old)] = old.float() * self._norm_scale
        return grown.to(self._dtype)

    def _filler(self, name: str, size: tuple[int, int]) -> Tensor:
        """Random numbers that depend only on the seed and the tensor's name."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        return torch.empty(size, dtype=self._dtype).normal_(std=FILLER_STD, generator=generator)


def main() -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.models.grow", description="Grow a Llama without changing its function."
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint to grow")
    parser.add_argument("--size", type=parse_size, required=True, help=f"{', '.join(SIZES)}, or a count like 10M")
    parser.add_argument("--hidden", type=int, help="width; a power of four times the source's is exact in bfloat16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the filler")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    size = Size(
        args.size.num_parameters, args.hidden or args.size.hidden_size, args.layers or args.size.num_hidden_layers
    )
    try:
        shape = shape_of_size(read_shape(args.model), size)
        grow(args.model, args.out, shape, args.dtype, args.seed)
    except (CannotGrow, OSError) as error:
        parser.error(str(error))
    print(f"{args.out}: {shape.num_parameters / 1e6:.1f}M parameters, {asdict(shape)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
