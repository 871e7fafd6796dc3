"""Reads a ServiceConfig: from YAML, from the arguments of a Serve application, from NAME=VALUE on the command line.

Knows files and text; what a setting means and which values it may have is said in core.config alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from core.config import EngineConfig, FleetConfig, LinkTls, ServiceConfig, WorkerConfig
from core.errors import ConfigError

DEMO_DIRECTORY = Path(__file__).resolve().parents[1] / "models" / "demo"
DEMO_SETTINGS: Mapping[str, Any] = {
    "model_name": "outrider-demo",
    "target": {"engine": {"model": str(DEMO_DIRECTORY / "target"), "deterministic": True}},
    "draft": {"engine": {"model": str(DEMO_DIRECTORY / "draft")}},
}
Worker = TypeVar("Worker", bound=WorkerConfig)
Config = TypeVar("Config", ServiceConfig, FleetConfig)
_SERVICE_CONFIG = TypeAdapter(ServiceConfig)
_FLEET_CONFIG = TypeAdapter(FleetConfig)


def demo_config(overrides: Sequence[str] = ()) -> ServiceConfig:
    """The pair of models that the project ships."""
    return parse_config(override(DEMO_SETTINGS, overrides))


def read_config(path: Path, overrides: Sequence[str] = ()) -> ServiceConfig:
    """The configuration in a YAML file, whose relative paths start at the file.

    Raises: ConfigError, which names the setting.
    """
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(settings).__name__}")
    return parse_config(override(settings, overrides), path.resolve().parent)


def parse_config(settings: Mapping[str, Any], directory: Path | None = None) -> ServiceConfig:
    """The configuration that nested `settings` describe; relative paths start at `directory`, else at the current one.

    Raises: ConfigError, which names the setting.
    """
    config = _validated(_SERVICE_CONFIG, settings)
    if config.shared_draft is not None:
        raise ConfigError(f"shared_draft: a service of one model has none to share, got {config.shared_draft!r}")
    return _located(config, directory or Path.cwd())


def parse_fleet(settings: Mapping[str, Any], directory: Path | None = None) -> FleetConfig:
    """The same for several models; the settings of one are taken for a fleet of one. Raises: ConfigError."""
    if "models" not in settings:
        config = parse_config(settings, directory)
        return FleetConfig((config,), orchestrator=config.orchestrator)
    for model in settings["models"] if isinstance(settings["models"], list) else ():
        if isinstance(model, dict) and "orchestrator" in model:
            raise ConfigError("models.orchestrator: models share their orchestrators; set it beside them")
    fleet, base = _validated(_FLEET_CONFIG, settings), directory or Path.cwd()
    return replace(
        fleet,
        models=tuple(_located(model, base) for model in fleet.models),
        drafts={name: _resolve(draft, base) for name, draft in fleet.drafts.items()},
    )


def _validated(kind: TypeAdapter[Config], settings: Mapping[str, Any]) -> Config:
    try:
        return kind.validate_python(settings)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(problem) for problem in error.errors())) from None


def _located(config: ServiceConfig, base: Path) -> ServiceConfig:
    draft = _resolve(config.draft, base) if config.draft is not None else None
    return replace(config, target=_resolve(config.target, base), draft=draft)


def override(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `settings` with each NAME=VALUE put in its place: the name is a dotted path, the value is YAML.

    Raises: ConfigError for what is not NAME=VALUE, or leads through something that has no settings.
    """
    changed = deepcopy(dict(settings))
    for item in overrides:
        name, separator, text = item.partition("=")
        if not separator or not all(name.split(".")):
            raise ConfigError(f"a setting is given as NAME=VALUE (for example target.num_replicas=2), got {item!r}")
        _put(changed, name, _value(item, text))
    return changed


def _put(settings: dict[str, Any], name: str, value: object) -> None:
    *groups, last = name.split(".")
    for depth, group in enumerate(groups, start=1):
        if settings.get(group) is None:
            settings[group] = {}
        settings = settings[group]
        if not isinstance(settings, dict):
            raise ConfigError(f"{name}: {'.'.join(groups[:depth])} is a value and has no settings of its own")
    settings[last] = value


def _value(item: str, text: str) -> object:
    try:
        value: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value in {item!r} is not YAML") from error
    return value


def _explain(problem: Mapping[str, Any]) -> str:
    """One problem that pydantic found, with the path of the setting."""
    path = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"{path}: there is no such setting"
        case "missing":
            return f"{path}: must be set"
        case "value_error":  # raised by core.config, which names the setting but not the way to it
            return f"{path}{'.' if path else ''}{problem['ctx']['error']}"
        case _:
            return f"{path or 'the configuration'}: {problem['msg']}, got {problem['input']!r}"


def _resolve(worker: Worker, directory: Path) -> Worker:
    """The same worker with absolute paths to its model and its certificates."""
    engine: EngineConfig = worker.engine

    def located(path: str) -> str:
        return str(directory / Path(path).expanduser())

    tls = engine.link_tls
    if tls is not None:
        tls = LinkTls(located(tls.certificate_file), located(tls.key_file), located(tls.ca_file))
    return replace(worker, engine=replace(engine, model=located(engine.model), link_tls=tls))
