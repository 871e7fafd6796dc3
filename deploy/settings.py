"""Reads a ServiceConfig from YAML, the environment, the command line, or a Serve application's arguments.

Knows files and text; core.config alone defines the meaning and the range of a setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from core.config import DTYPES_ALLOWED, EngineConfig, FleetConfig, LinkTls, ServiceConfig, WorkerConfig
from core.errors import ConfigError
from deploy.sources import Setting, Sources, yaml_value
from orchestrator.guessers import check_sources

DEMO_DIRECTORY = Path(__file__).resolve().parents[1] / "models" / "demo"
DEMO_SETTINGS: Mapping[str, Any] = {
    "model_name": "outrider-demo",
    "target": {"engine": {"model": str(DEMO_DIRECTORY / "target"), "deterministic": True}},
    "draft": {"engine": {"model": str(DEMO_DIRECTORY / "draft")}},
}
PREFIX = "OUTRIDER_"
"""Prefix of environment variables that are settings."""
Worker = TypeVar("Worker", bound=WorkerConfig)
Config = TypeVar("Config", ServiceConfig, FleetConfig)
_SERVICE_CONFIG = TypeAdapter(ServiceConfig)
_FLEET_CONFIG = TypeAdapter(FleetConfig)
NO_SOURCES = Sources()
WIDE = 1 << 20
"""Columns of YAML output, wide enough to keep a value and its source on one line."""
_TOP_LEVEL = {field.name for field in fields(ServiceConfig)}


def environment_settings(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Settings from environment variables such as OUTRIDER_TARGET__ENGINE__DTYPE=bfloat16, with YAML values.

    Groups come before their parts. Other variables with the prefix, such as OUTRIDER_TOKEN, have no double underscore
    and are no settings. Raises: ConfigError.
    """
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(PREFIX).lower().replace("__", ".")
        if variable.startswith(PREFIX) and ("." in name or name in _TOP_LEVEL):
            yield Setting(name, yaml_value(text, f"{variable}={text}"), f"{variable} in the environment")


def demo_config(overrides: Sequence[str] = ()) -> ServiceConfig:
    """The configuration of the shipped demo pair, with each NAME=VALUE applied. Raises: ConfigError."""
    return service_config(None, [Setting.parse(text) for text in overrides])


def read_config(file: Path, overrides: Sequence[str] = ()) -> ServiceConfig:
    """The configuration in a YAML file, with each NAME=VALUE applied. Raises: ConfigError."""
    return service_config(file, [Setting.parse(text) for text in overrides])


def service_config(file: Path | None, given: Sequence[Setting]) -> ServiceConfig:
    """The configuration in a YAML file, or of the demo pair, with the `given` settings applied in order.

    Relative paths start at the file. Raises: ConfigError, which names the setting and its source.
    """
    return explained_config(file, given)[0]


def explained_config(file: Path | None, given: Sequence[Setting]) -> tuple[ServiceConfig, Sources]:
    """The configuration as in `service_config`, and the source of each setting. Raises: ConfigError."""
    if file is None:
        names = frozenset(name for name, _ in flat(DEMO_SETTINGS))
        sources = Sources(given, built_in="the demo pair", built_in_names=names)
        return _service(_put_all(DEMO_SETTINGS, given), Path.cwd(), sources), sources
    settings, text = _read(file)
    sources = Sources.in_file(given, file, text)
    return _service(_put_all(settings, given), file.resolve().parent, sources), sources


def as_explained_yaml(config: ServiceConfig, sources: Sources) -> str:
    """The configuration as YAML that `read_config` accepts. Comments name the source of each value."""
    return "".join(_explained(_SERVICE_CONFIG.dump_python(config, mode="json"), sources))


def _explained(settings: Mapping[str, Any], sources: Sources, prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key, value in settings.items():
        name = prefix + key
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:\n"
            yield from _explained(value, sources, f"{name}.")
        else:
            text = yaml.safe_dump([value], default_flow_style=True, width=WIDE).strip()[1:-1]
            yield f"{indent}{key}: {text}  # {sources.of(name)}\n"


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that is not a group, with its dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """The settings in a file, and its text. Raises: ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
        settings = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} must hold a mapping of settings, got {type(settings).__name__}")
    return settings, text


def parse_config(settings: Mapping[str, Any], directory: Path | None = None) -> ServiceConfig:
    """The configuration in nested `settings`. Relative paths start at `directory`, or at the current directory.

    Raises: ConfigError, which names the setting.
    """
    return _service(settings, directory or Path.cwd())


def _service(settings: Mapping[str, Any], base: Path, sources: Sources = NO_SOURCES) -> ServiceConfig:
    config = _validated(_SERVICE_CONFIG, settings, sources)
    if config.shared_draft is not None:
        raise ConfigError(
            f"shared_draft: only models of a fleet share drafts; set draft instead, got {config.shared_draft!r}"
        )
    return _located(config, base, sources)


def read_fleet(file: Path) -> FleetConfig | None:
    """The fleet in a YAML file; None if the file describes a single model. Raises: ConfigError."""
    settings, text = _read(file)
    if "models" not in settings:
        return None
    return parse_fleet(settings, file.resolve().parent, Sources.in_file((), file, text))


def single_models(fleet: FleetConfig) -> list[ServiceConfig]:
    """The settings of each model, as if it were served alone."""
    return [
        replace(model, draft=fleet.draft_of(model), shared_draft=None, orchestrator=fleet.orchestrator)
        for model in fleet.models
    ]


def as_fleet_yaml(fleet: FleetConfig) -> str:
    """The fleet as YAML that `read_fleet` accepts."""
    settings = _FLEET_CONFIG.dump_python(fleet, mode="json")
    models = [{name: value for name, value in each.items() if name != "orchestrator"} for each in settings["models"]]
    return yaml.safe_dump({**settings, "models": models}, sort_keys=False)


def parse_fleet(
    settings: Mapping[str, Any], directory: Path | None = None, sources: Sources = NO_SOURCES
) -> FleetConfig:
    """Like `parse_config`, for a fleet. Settings of a single model become a fleet of one. Raises: ConfigError."""
    if "models" not in settings:
        config = parse_config(settings, directory)
        return FleetConfig((config,), orchestrator=config.orchestrator)
    for model in settings["models"] if isinstance(settings["models"], list) else ():
        if isinstance(model, dict) and "orchestrator" in model:
            raise ConfigError("models.orchestrator: models share their orchestrators; set it beside them")
    fleet, base = _validated(_FLEET_CONFIG, settings, sources), directory or Path.cwd()
    return replace(
        fleet,
        models=tuple(_located(each, base, sources, f"models.{index}.") for index, each in enumerate(fleet.models)),
        drafts={name: _resolve(draft, base) for name, draft in fleet.drafts.items()},
    )


def _validated(kind: TypeAdapter[Config], settings: Mapping[str, Any], sources: Sources = NO_SOURCES) -> Config:
    try:
        return kind.validate_python(settings)
    except ValidationError as error:
        problems = (_explain(problem, sources) for problem in error.errors())
        raise ConfigError("; ".join(problems)) from None


def _located(config: ServiceConfig, base: Path, sources: Sources = NO_SOURCES, prefix: str = "") -> ServiceConfig:
    """The configuration with absolute paths. `prefix` is the model's path in a fleet. Raises: ConfigError."""
    try:
        check_sources(config.speculation)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}{sources.of_problem(f'{prefix}speculation.guessers')}") from None
    draft = _resolve(config.draft, base) if config.draft is not None else None
    speculation = config.speculation
    if speculation.retrieval_index is not None:
        speculation = replace(speculation, retrieval_index=str(base / Path(speculation.retrieval_index).expanduser()))
    extra = tuple(_resolve(each, base) for each in config.extra_drafts)
    target = _resolve(config.target, base)
    return replace(config, target=target, draft=draft, extra_drafts=extra, speculation=speculation)


def override(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `settings` with each NAME=VALUE applied.

    Raises: ConfigError if the text is not NAME=VALUE, or if its path leads through a value.
    """
    return _put_all(settings, [Setting.parse(text) for text in overrides])


def _put_all(settings: Mapping[str, Any], given: Sequence[Setting]) -> dict[str, Any]:
    changed = deepcopy(dict(settings))
    for setting in given:
        _put(changed, setting)
    return changed


def _put(settings: dict[str, Any], setting: Setting) -> None:
    *groups, last = setting.name.split(".")
    for depth, group in enumerate(groups, start=1):
        if settings.get(group) is None:
            settings[group] = {}
        settings = settings[group]
        if not isinstance(settings, dict):
            path = ".".join(groups[:depth])
            raise ConfigError(f"{setting.name}: {path} is a value and has no settings of its own ({setting.source})")
    settings[last] = setting.value


def _explain(problem: Mapping[str, Any], sources: Sources) -> str:
    """One problem found by pydantic, with the path and source of the setting."""
    path = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            text = f"{path}: there is no such setting"
        case "missing":
            text = f"{path}: must be set"
        case "value_error":  # raised by core.config, which names the setting without its path
            text = f"{path}{'.' if path else ''}{problem['ctx']['error']}"
        case "literal_error" if path.endswith("dtype"):
            text = f"{path} must be {DTYPES_ALLOWED}, got {problem['input']!r}"
        case _:
            wrong = problem["msg"].replace("valid tuple", "list")  # YAML's name for it
            text = f"{path or 'the configuration'}: {wrong}, got {problem['input']!r}"
    return text + sources.of_problem(re.split("[: ]", text)[0])


def _resolve(worker: Worker, directory: Path) -> Worker:
    """The worker with absolute paths to its model, its head, its adapters, its buffer and its certificates."""
    engine: EngineConfig = worker.engine

    def located(path: str) -> str:
        return str(directory / Path(path).expanduser())

    tls = engine.link_tls
    if tls is not None:
        tls = LinkTls(located(tls.certificate_file), located(tls.key_file), located(tls.ca_file))
    head = None if engine.head is None else located(engine.head)
    buffer = None if engine.learning_buffer is None else located(engine.learning_buffer)
    adapters = {name: located(path) for name, path in engine.adapters.items()}
    model = located(engine.model)
    engine = replace(engine, model=model, head=head, adapters=adapters, learning_buffer=buffer, link_tls=tls)
    return replace(worker, engine=engine)
