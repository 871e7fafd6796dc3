"""The training corpus: the running interpreter's standard library, without tests and data tables."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EXCLUDED_DIRECTORIES: Final = frozenset(
    {
        "site-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",  # character tables: a quarter of all bytes without the tests, and hardly any code
        "pydoc_data",  # the reference manual as one string literal
        "__pycache__",
    }
)
HELD_OUT_PERCENT: Final = 5


@dataclass(frozen=True)
class Document:
    """One source file: its path relative to the library's root, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Split:
    training: list[Document]
    held_out: list[Document]


def library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def source_names(root: Path) -> list[str]:
    """POSIX paths of the library's own Python files, sorted, so that the file system's order does not matter."""
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(name.as_posix() for name in names if not is_excluded(name))


def is_excluded(name: Path) -> bool:
    """Whether a file is in a folder of tests, installed packages, tables or build configuration."""
    return any(part in EXCLUDED_DIRECTORIES or part.startswith("config-") for part in name.parts[:-1])


def is_held_out(name: str) -> bool:
    """Whether a file is kept from all training. Decided by a hash of its path, independent of other files."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def load_split(root: Path | None = None) -> Split:
    """Read and split the library. Files that are empty or not UTF-8 are left out."""
    root = root or library_root()
    split = Split(training=[], held_out=[])
    for name in source_names(root):
        text = read_utf8(root / name)
        if text:
            (split.held_out if is_held_out(name) else split.training).append(Document(name, text))
    return split


def read_utf8(path: Path) -> str:
    """The file's text, or "" if it is not UTF-8: text decoded with the wrong encoding would teach wrong bytes."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""
