"""Digest of a checkpoint: of config.json and every tensor, however the tensors are spread over files.

Knows the layout of safetensors files (a JSON header, then the tensors' bytes). Must not know what tensors are for.

There are two kinds. `sha256` covers every byte of every tensor. `sha256-sampled` covers the name, type, shape and three
blocks of each tensor, and reads at most a few megabytes at any model size. It distinguishes checkpoints that were
trained, merged or quantized differently, but misses changes of single weights between the blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

WHOLE, SAMPLED = "sha256", "sha256-sampled"
SAMPLE_BYTES = 4096
"""Size of a sampled block. Blocks lie at a tensor's beginning, in its middle and at its end."""
READ_BYTES = 2**20
HEADER_LENGTH_BYTES = 8
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Byte range of one tensor in its file."""

    file: Path
    description: str
    """Type and shape from the file's header."""
    begin: int
    end: int


def digest(config: Path, files: Sequence[Path], whole_bytes: int) -> str:
    """Compute the digest of these weight files; `sha256` up to `whole_bytes`, else `sha256-sampled`.

    Raises: OSError, ValueError.
    """
    tensors = dict(sorted(item for file in files for item in _tensors(file)))
    is_whole = sum(tensor.end - tensor.begin for tensor in tensors.values()) <= whole_bytes
    found = hashlib.sha256(json.dumps(json.loads(config.read_bytes()), sort_keys=True).encode())
    for name, tensor in tensors.items():
        found.update(f"\n{name} {tensor.description} {tensor.end - tensor.begin}\n".encode())
        with tensor.file.open("rb") as opened:
            for begin, end in [(tensor.begin, tensor.end)] if is_whole else _blocks(tensor):
                for data in _read(opened, begin, end):
                    found.update(data)
    return f"{WHOLE if is_whole else SAMPLED}:{found.hexdigest()}"


def _tensors(file: Path) -> Iterator[tuple[str, TensorBytes]]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(HEADER_LENGTH_BYTES), "little")
        header = json.loads(opened.read(length))
    data = HEADER_LENGTH_BYTES + length
    for name, entry in header.items():
        if name != METADATA:
            begin, end = entry["data_offsets"]
            yield name, TensorBytes(file, f"{entry['dtype']} {entry['shape']}", data + begin, data + end)


def _blocks(tensor: TensorBytes) -> list[tuple[int, int]]:
    if tensor.end - tensor.begin <= 3 * SAMPLE_BYTES:
        return [(tensor.begin, tensor.end)]
    middle = (tensor.begin + tensor.end - SAMPLE_BYTES) // 2
    return [(begin, begin + SAMPLE_BYTES) for begin in (tensor.begin, middle, tensor.end - SAMPLE_BYTES)]


def _read(opened: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    opened.seek(begin)
    while begin < end:
        data = opened.read(min(READ_BYTES, end - begin))
        if not data:
            raise ValueError(f"{opened.name} is shorter than its header says")
        yield data
        begin += len(data)
