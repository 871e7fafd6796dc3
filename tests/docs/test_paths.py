"""Documents name files by paths that exist, and each other by links that work. The log is not checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GONE = {"orchestrator/course.py", "core/search.py", "core/planning.py", "tests/docs/test_way.py"}
"""Files that decisions tell of as deleted."""
EXAMPLES = {
    "orchestrator/guessers/repetition.py",
    "workers/runtime/backends/one_thread.py",
    "tests/workers/runtime/backends/test_one_thread.py",
}
"""Files that a reader of docs/howto makes."""
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("k8s/*.md"))
    if path.parent.name != "log" and path.name != "CHANGELOG.md"
)


def named_files(text):
    """Paths in code marks; a bare file name belongs to the folder that was named before it, and is not asked for."""
    return set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|proto|svg))`", text))


def links(text):
    return {target for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in target}


def test_the_documents_are_found():
    assert {Path("README.md"), Path("docs/architecture.md"), Path("docs/howto/add-a-guesser.md")} <= set(DOCUMENTS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_what_a_document_names_is_there(document):
    text, here = (ROOT / document).read_text(), (ROOT / document).parent
    files = named_files(text) - GONE - EXAMPLES
    missing = {name for name in files if not ((ROOT / name).exists() or (here / name).exists())}
    missing |= {target for target in links(text) if not (here / target).exists()}
    assert not missing


def test_what_is_exempted_is_not_there():
    assert not [name for name in GONE if (ROOT / name).exists()]


def test_what_readers_make_is_made_by_a_page():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "howto").glob("add-*.md"))
    assert not [name for name in EXAMPLES if f"`{name}`" not in pages]


def test_the_tree_in_the_readme_names_the_folders_that_are_there():
    _, _, tree = (ROOT / "README.md").read_text().partition("## What is where\n")
    named = re.findall(r"^    ([a-z0-9]+)/ ", tree, re.MULTILINE)
    tracked = {path.parent.name for path in ROOT.glob("*/*") if path.suffix in {".py", ".md", ".yaml"}}
    hidden = {name for name in tracked if name.startswith((".", "_")) or name.endswith(".egg-info")}
    assert set(named) == (tracked | {"k8s", "clients", "protos"}) - hidden
    assert not [name for name in named if not (ROOT / name).is_dir()]


def test_the_tree_of_the_architecture_names_folders_that_are_there_and_all_that_are_packages():
    _, _, rest = (ROOT / "docs/architecture.md").read_text().partition("## What is where\n")
    tree = rest.partition("\n## ")[0]
    top, named = "", set()
    for line in filter(None, tree.splitlines()):
        indent, names = len(line) - len(line.lstrip()), line[: 32 if line.startswith("      ") else 30].split()
        for name in (each for each in names if each.endswith("/")):
            path = name if indent == 4 else top + name
            top = name if indent == 4 else top
            named.add(path.rstrip("/"))
    assert not [name for name in named if not (ROOT / name).is_dir()]
    packages = {
        str(folder.parent.relative_to(ROOT))
        for package in ("core", "orchestrator", "workers", "simulation", "deploy")
        for folder in (ROOT / package).glob("*/__init__.py")
    }
    assert packages <= named
