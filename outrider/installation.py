"""Checks that Outrider's packages are its own: another distribution may install a package with the same name (`core`).

Does not import these packages.
"""

from __future__ import annotations

import sys
from base64 import urlsafe_b64encode
from csv import reader
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "orchestrator", "workers", "simulation", "protos", "deploy")


def check_packages() -> None:
    """Raises: ImportError naming the package and what was found in its place."""
    for name in PACKAGES:
        if (found := _place(name)) != HOME / name:
            raise ImportError(_shadowed(name, found), name=name)
    for name in _overwritten():
        raise ImportError(_replaced(name), name=name)


def _place(name: str) -> Path | None:
    """The folder or module that `import name` would load."""
    if (module := sys.modules.get(name)) is not None:
        return _folder(getattr(module, "__file__", None), getattr(module, "__path__", ()))
    spec = find_spec(name)
    return None if spec is None else _folder(spec.origin, spec.submodule_search_locations or ())


def _folder(file: str | None, folders: object) -> Path | None:
    path = Path(file) if file is not None else Path(next(iter(folders), ""))  # type: ignore[call-overload]
    return (path.parent if path.name == "__init__.py" else path).resolve()


def _overwritten() -> list[str]:
    """Packages whose `__init__.py` differs from pip's record, because another distribution has overwritten it."""
    try:
        record = distribution("outrider").read_text("RECORD") or ""
    except PackageNotFoundError:
        return []
    rows = [row for row in reader(record.splitlines()) if row[0] in {f"{name}/__init__.py" for name in PACKAGES}]
    return [Path(file).parent.name for file, digest, _ in rows if digest != _digest(HOME / file)]


def _digest(file: Path) -> str:
    data = file.read_bytes() if file.exists() else b""
    return "sha256=" + urlsafe_b64encode(sha256(data).digest()).decode().rstrip("=")


def _shadowed(name: str, found: Path | None) -> str:
    if found is None:
        return f"Outrider's package {name!r} is missing in {HOME}: install Outrider again"
    return (
        f"{found} is imported in place of Outrider's package {name!r} in {HOME}: "
        "rename it, remove its folder from PYTHONPATH, or start somewhere else"
    )


def _replaced(name: str) -> str:
    others = sorted(set(packages_distributions().get(name, ())) - {"outrider"})
    return (
        f"{HOME / name} has been overwritten by another distribution ({', '.join(others) or 'since removed'}): "
        "install Outrider in an environment of its own"
    )
