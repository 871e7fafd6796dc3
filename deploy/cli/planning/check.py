"""`outrider check`: whether a pair of models can be served, and if not, why; and the gain to expect from drafting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from core.config import EngineConfig, SpeculationConfig
from core.errors import ConfigError, StartupError
from core.ranges import Range, ranges_of
from core.records import GenerationRequest, Sampling
from core.results import as_json
from deploy.cli.generate import EXIT_FAILED
from deploy.cli.options import Numbers, check_folders, number, numbers, read_prompts
from deploy.cli.planning.measuring import PANEL, SPARE_KV_TOKENS, MeasuringOptions, prepare
from deploy.cli.planning.needs import NeedsOptions, needs_of
from deploy.cli.planning.needs_report import lines as needs_lines
from deploy.cli.planning.needs_report import results as needs_results
from deploy.cli.planning.simulate import PRESETS_HELP, Preset
from deploy.cli.terminal import progress, working
from simulation.engines import PRESETS

if TYPE_CHECKING:
    from deploy.measure import Plan  # imports torch

BOTH = Numbers((0.0, 1.0))
"""Greedy decoding, and sampling from the target's own distribution."""
Q_TOP_TOKENS = SpeculationConfig().q_top_tokens


@dataclass(frozen=True, kw_only=True)
class CheckOptions(MeasuringOptions, NeedsOptions):
    """Check whether a pair of models can be served. If not, print the reason and exit with status 1."""

    head: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Head of the target (MTP: the target's own directory), to check that it fits; with --measure also "
            "what its passes take.",
        ),
    ] = None
    no_weights: Annotated[
        bool,
        Option(
            "--no-weights",
            help="Read only the configuration, the vocabulary and the headers of the weights, to save memory.",
        ),
    ] = False
    measure: Annotated[
        bool,
        Option(
            "--measure",
            help="Decode --prompts in this process; report how often guesses are accepted and the speed-up to expect.",
            rich_help_panel=PANEL,
        ),
    ] = False
    prompts: Annotated[
        Path | None,
        Option(metavar="FILE", help="One prompt a line, or a .jsonl file of JSON strings.", rich_help_panel=PANEL),
    ] = None
    temperatures: Annotated[
        Numbers, numbers(ranges_of(Sampling)["temperature"], "Sampling temperatures", metavar="T[,T...]", panel=PANEL)
    ] = BOTH
    q_top_tokens: Annotated[
        int,
        number(
            Range(1, 4096, is_whole=True),
            "Tokens kept of the draft's q in rejection verification, the likeliest ones",
            panel=PANEL,
        ),
    ] = Q_TOP_TOKENS
    draft_temperature: Annotated[
        float | None,
        number(
            ranges_of(GenerationRequest)["draft_temperature"],
            "Temperature of the draft, in place of --temperatures",
            metavar="T",
            panel=PANEL,
        ),
    ] = None
    timing: Annotated[
        Preset | None,
        Option(help=f"Hardware to predict for, in addition to this machine. {PRESETS_HELP}", rich_help_panel=PANEL),
    ] = None


def check(options: CheckOptions) -> int:
    """Check the pair; returns the exit status. Only loading the models, as engines do, shows that they can be served.

    Raises: ConfigError.
    """
    if options.gpu is not None:
        return _check_needs(options, options.gpu)
    _check_no_needs(options)
    texts = _texts_of(options)
    is_quick = options.no_weights or options.measure  # measuring loads the weights
    found: list[str] = []
    try:
        _check_files(options)
        for directory in filter(None, (options.target, options.draft)):
            sys.stdout.write(f"{directory}: {_described(directory, is_quick)}\n")
        if options.head is not None and is_quick:
            sys.stdout.write(f"{options.head}: {_described_head(options.head, options.target)}\n")
        elif options.head is not None:
            sys.stdout.write(f"{options.head}: {_loaded_head(EngineConfig(str(options.target)), options.head)}\n")
        if options.measure:
            found = _measured(options, texts)
    except ConfigError:  # an option is wrong, not the pair
        raise
    except StartupError as error:
        sys.stdout.write(f"not servable: {error}\n")
        return EXIT_FAILED
    verdict = "servable, as far as can be told without the weights" if options.no_weights else "servable"
    shared = ": draft and target share their vocabulary" if options.draft is not None else ""
    sys.stdout.write("\n".join([f"{verdict}{shared}", *found, ""]))
    return 0


def _check_files(options: CheckOptions) -> None:
    """Check what `outrider serve` checks before it starts. Raises: StartupError."""
    from deploy.checkpoints import check_models  # imports torch

    drafts = {} if options.draft is None else {"--draft": EngineConfig(str(options.draft))}
    head = None if options.head is None else str(options.head)
    check_models(EngineConfig(str(options.target), head=head), drafts, "--target")


def _described(directory: Path, no_weights: bool) -> str:
    """Raises: StartupError."""
    from workers.model import load, survey  # imports torch

    config = EngineConfig(str(directory))
    info = survey(config) if no_weights else load(config, lambda _: None).info
    source = f", source up to {info.max_source_tokens} tokens" if info.max_source_tokens else ""
    return (
        f"{info.architecture}, {info.num_parameters:,} parameters, {info.vocab_size} tokens, "
        f"context {info.max_context_tokens}{source}"
    )


def _described_head(head: Path, target: Path) -> str:
    """Raises: StartupError."""
    from workers.heads import read_head  # imports torch

    return f"a head that reads the target's layers {list(read_head(str(head), str(target)).feature_layers)}"


def _loaded_head(config: EngineConfig, head: Path, *, is_timed: bool = False) -> str:
    """Describe a head of this target, or with `is_timed` how long its passes take. Raises: StartupError."""
    from workers.runtime import load_head_runtime

    own = replace(config, head=str(head), kv_cache_tokens=SPARE_KV_TOKENS)
    runtime = load_head_runtime(own, lambda _: None)
    if not is_timed:
        kind, num_parameters = runtime.info.architecture, runtime.info.num_parameters
        return f"{kind}, {num_parameters:,} parameters: {_described_head(head, Path(config.model))}"
    times = runtime.warm_up(lambda _: None).step_times_s
    return "a pass of the head takes " + ", ".join(f"{1e3 * s:.2f} ms ({num} rows)" for num, s in times)


# What it needs


def _check_needs(options: CheckOptions, gpu: str) -> int:
    """Returns the exit status. Raises: ConfigError."""
    if options.measure or options.no_weights or options.head is not None:
        raise ConfigError("--gpu reads config.json alone: leave out --measure, --no-weights and --head")
    check_folders(options.json)
    try:
        with working("simulating the ways of decoding"):
            needs = needs_of(options, gpu)
    except ConfigError:
        raise
    except StartupError as error:
        sys.stdout.write(f"not servable: {error}\n")
        return EXIT_FAILED
    sys.stdout.write("\n".join([*needs_lines(needs), ""]))
    if options.json is not None:
        options.json.write_text(as_json(needs_results(needs)))
    return 0


def _check_no_needs(options: CheckOptions) -> None:
    """Raises: ConfigError for options that mean nothing without --gpu."""
    for name in ("draft_gpu", "kv_dtype", "draft_kv_dtype", "rate", "acceptance", "dollars", "draft_dollars"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --gpu")
    for name, path in (("--target", options.target), ("--draft", options.draft)):
        if path is not None and path.is_file() and path.suffix == ".json":
            raise ConfigError(f"{name}: {path} is a file, which is enough with --gpu; without it, give the directory")


# The gain of drafting


def _texts_of(options: CheckOptions) -> list[str]:
    """The prompts, after all checks that need no model. Raises: ConfigError."""
    if options.measure != (options.prompts is not None):
        raise ConfigError("--measure and --prompts go together: give both, with a file of your own prompts")
    if options.measure and options.no_weights:
        raise ConfigError("--measure needs the weights: leave out --no-weights")
    if options.json is not None and not options.measure:
        raise ConfigError("--json needs --measure, whose figures it writes")
    check_folders(options.json)
    if options.prompts is None:
        return []
    return read_prompts(options.prompts)


def _measured(options: CheckOptions, texts: Sequence[str]) -> list[str]:
    """The lines of the report. Raises: StartupError."""
    from deploy.measure import Timing, lines, results, survey

    plan = _plan_of(options, texts)
    with progress("measuring", plan.num_steps) as step_done:
        found = survey(plan, lambda _: step_done())
    presets = {} if options.timing is None else {options.timing: PRESETS[options.timing]}
    timings = [Timing(name, each.target.pass_s, each.draft.pass_s) for name, each in presets.items()]
    if options.json is not None:
        options.json.write_text(as_json(results(found, timings)))
    heads = [] if options.head is None else [_loaded_head(plan.target, options.head, is_timed=True)]
    return ["", *lines(found, timings), *heads]


def _plan_of(options: CheckOptions, texts: Sequence[str]) -> Plan:
    """Raises: CheckpointError."""
    from deploy.measure import Plan

    prompts, config = prepare(options, options.target, texts)
    draft = None if options.draft is None else replace(config, model=str(options.draft))
    return Plan(
        config,
        draft,
        prompts,
        options.temperatures.values,
        options.tokens,
        options.gamma,
        q_top_tokens=options.q_top_tokens,
        draft_temperature=options.draft_temperature,
    )
