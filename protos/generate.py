"""Generates the committed Python code from the .proto files; `--check` fails when the two disagree.

Run from anywhere as `python -m protos.generate`. Knows grpcio-tools; nothing of the product imports it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("protos/outrider/v1/generation.proto",)
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path) -> None:
    """Write the code of all SOURCES below `out`. Raises: SystemExit when protoc refuses one."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--proto_path={well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *SOURCES,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc ended with status {status}")


def drifted() -> list[str]:
    """Generated files, relative to the root, that are missing or differ from what the .proto files give now."""
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate(fresh)
        return [path for path in generated_paths() if not _is_same(fresh / path, ROOT / path)]


def generated_paths() -> Iterator[str]:
    """All generated files, relative to the root."""
    for source in SOURCES:
        for suffix in SUFFIXES:
            yield source.removesuffix(".proto") + suffix


def _is_same(fresh: Path, committed: Path) -> bool:
    return committed.is_file() and fresh.read_bytes() == committed.read_bytes()


def main(argv: Sequence[str] | None = None) -> int:
    """Generate, or with `--check` compare. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the committed code is not current")
    if not parser.parse_args(argv).check:
        generate(ROOT)
        return 0
    stale = drifted()
    if stale:
        sys.stderr.write(f"not what the .proto files give: {', '.join(stale)}; run python -m protos.generate\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
