"""A class name says which class is meant, and a folder's list can be read at a glance."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "core",
    "orchestrator",
    "workers",
    "simulation",
    "deploy",
    "outrider",
    "bench",
    "clients/python/outrider_client",
)
MOST_FILES = 12
WITH_A_TABLE = {"core/rules", "orchestrator/guessers", "workers/runtime/backends", "workers/sampling"}
"""Folders with a file for each entry of a table, which is their map: docs/howto tells how to add one."""


def modules(package):
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_name_is_used_twice_in_a_package(package):
    """Files may share a name across folders: `deploy/grpc/wire.py` and `deploy/http/wire.py` do the same step."""
    places = defaultdict(list)
    for module in modules(package):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.relative_to(ROOT)}:{node.lineno}")
    assert places
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_has_at_most_twelve_modules(package):
    num_modules = defaultdict(int)
    for module in modules(package):
        num_modules[str(module.parent.relative_to(ROOT))] += 1
    crowded = {folder: number for folder, number in num_modules.items() if number > MOST_FILES}
    assert {folder: number for folder, number in crowded.items() if folder not in WITH_A_TABLE} == {}


def test_folders_with_a_table_are_there():
    assert not [folder for folder in WITH_A_TABLE if not (ROOT / folder).is_dir()]
