"""Generates the committed Python code from the .proto files; `--check` fails when the two disagree.

Run from anywhere as `python -m protos.generate`. With `--language go` or `typescript` it writes a client's code in that
language to `--out`, with plugins of protoc that must be installed (docs/howto/call-from-go-or-typescript.md). Knows
grpcio-tools; nothing of the product imports it. The generated code of the public API is part of the Python client, a
separate distribution that imports nothing of the project. The project imports it from there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from protos.client_parameters import module_of

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("protos/outrider/v1/generation.proto",)
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
LINK_SOURCES = ("protos/outrider/link/v1/link.proto",)
"""Messages between orchestrators and engines. They define no services."""
MESSAGE_SUFFIXES = ("_pb2.py", "_pb2.pyi")
CLIENT = "clients/python/outrider_client/_proto"
"""Folder of the code generated from SOURCES."""
CLIENT_PARAMETERS = f"{CLIENT}/parameters.py"
CLIENT_SOURCES = (f"{CLIENT}/details.proto",)
"""Messages that only the client needs. They define no services."""
LANGUAGES = {
    "go": (("protoc-gen-go", "protoc-gen-go-grpc"), ("--go_out={out}", "--go-grpc_out={out}")),
    "typescript": (
        ("protoc-gen-ts_proto",),
        ("--ts_proto_out={out}", "--ts_proto_opt=outputServices=grpc-js,esModuleInterop=true,forceLong=string"),
    ),
}
"""The plugins that protoc needs, and its options."""


def generate(out: Path) -> None:
    """Write the code of all .proto files below `out`. Raises: SystemExit when protoc refuses one."""
    (out / CLIENT).mkdir(parents=True, exist_ok=True)
    _compile((*LINK_SOURCES, *CLIENT_SOURCES), f"--python_out={out}", f"--pyi_out={out}")
    with tempfile.TemporaryDirectory() as directory:
        _compile(SOURCES, *(f"--{kind}_out={directory}" for kind in ("python", "pyi", "grpc_python")))
        for path in _outputs(SOURCES, SUFFIXES):
            code = _standalone(Path(directory, path).read_text(encoding="utf-8"))
            (out / _in_client(path)).write_text(code, encoding="utf-8")
    (out / CLIENT_PARAMETERS).write_text(module_of(described(SOURCES[0])), encoding="utf-8")


def publish(language: str, out: Path, plugins: Path | None = None) -> None:
    """Write a client's code in another language below `out`; `plugins` is a folder that is searched before PATH.

    Raises: SystemExit when a plugin is missing, or protoc refuses.
    """
    needed, options = LANGUAGES[language]
    if plugins is not None:
        os.environ["PATH"] = f"{plugins.resolve()}{os.pathsep}{os.environ.get('PATH', '')}"
    if missing := [name for name in needed if shutil.which(name) is None]:
        raise SystemExit(f"{', '.join(missing)} not found: see docs/howto/call-from-go-or-typescript.md")
    out.mkdir(parents=True, exist_ok=True)
    _compile(SOURCES, *(option.format(out=out) for option in options))


def drifted() -> list[str]:
    """Generated files, relative to the root, that are missing or out of date."""
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate(fresh)
        return [path for path in generated_paths() if not _is_same(fresh / path, ROOT / path)]


def generated_paths() -> Iterator[str]:
    """All generated files, relative to the root."""
    yield from map(_in_client, _outputs(SOURCES, SUFFIXES))
    yield CLIENT_PARAMETERS
    yield from _outputs((*LINK_SOURCES, *CLIENT_SOURCES), MESSAGE_SUFFIXES)


def described(source: str) -> FileDescriptorProto:
    """The descriptor of a .proto file, with its comments."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "descriptors"
        _compile((source,), "--include_source_info", f"--descriptor_set_out={found}")
        return FileDescriptorSet.FromString(found.read_bytes()).file[0]


def _compile(sources: Sequence[str], *outputs: str) -> None:
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(["protoc", f"--proto_path={ROOT}", f"--proto_path={well_known}", *outputs, *sources])
    if status != 0:
        raise SystemExit(f"protoc ended with status {status}")


def _in_client(path: str) -> str:
    return f"{CLIENT}/{Path(path).name}"


def _standalone(code: str) -> str:
    """The same code, with an import relative to the client's package."""
    return code.replace("from protos.outrider.v1 import", "from . import")


def _outputs(sources: Sequence[str], suffixes: Sequence[str]) -> Iterator[str]:
    for source in sources:
        for suffix in suffixes:
            yield source.removesuffix(".proto") + suffix


def _is_same(fresh: Path, committed: Path) -> bool:
    return committed.is_file() and fresh.read_bytes() == committed.read_bytes()


def main(argv: Sequence[str] | None = None) -> int:
    """Generate, or with `--check` compare. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the committed code is not current")
    parser.add_argument("--language", choices=LANGUAGES, help="write a client's code in this language to --out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write it")
    parser.add_argument("--plugins", type=Path, metavar="DIR", help="where protoc's plugins are, if not on PATH")
    options = parser.parse_args(argv)
    if (options.language is None) != (options.out is None):
        parser.error("--language and --out go together")
    if options.language is not None:
        publish(options.language, options.out, options.plugins)
        return 0
    if not options.check:
        generate(ROOT)
        return 0
    stale = drifted()
    if stale:
        sys.stderr.write(f"not what the .proto files give: {', '.join(stale)}; run python -m protos.generate\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
