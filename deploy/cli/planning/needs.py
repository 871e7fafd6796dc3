"""The needs of a pair on GPUs that it has not run on: memory, time, replicas and money, from config.json alone.

Knows options and arithmetic; `needs_report` says the results. Imports torch only in the function that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from core.config import FP8_CAPABILITY, EngineConfig, KVDtype, SpeculationConfig
from core.costs import GPUS, Placed
from core.errors import ConfigError, UnsupportedModel
from core.ranges import Range
from core.records import STATES_BESIDE_GUESSES
from deploy.cli.options import number
from simulation.engines import EngineLaw, Hardware, HopLaw, steady_law
from simulation.report import Comparison, compare
from simulation.scenario import Closed, Scenario

if TYPE_CHECKING:
    from workers.model import Outline  # imports torch

PANEL = "What it needs, from config.json alone"
COUNTS = (1, 2, 4, 8)
"""GPUs of one node that a model may be split over."""
STEP_TOKENS = 2048
"""Rows of a step at most, as `outrider serve` chooses on a GPU."""
USED_SHARE = 0.8
"""Share of a replica's capacity that a steady load may use, because requests arrive at random."""
MAX_STREAMS = 512
HOP = HopLaw(0.001)
NUM_SIMULATED, SIMULATED_TOKENS = 8, 128


@dataclass(frozen=True, kw_only=True)
class NeedsOptions:
    """Options of commands that plan for GPUs."""

    target: Annotated[
        Path,
        Option(metavar="PATH", help="Checkpoint of the target, its directory; with --gpu its config.json will do."),
    ]
    draft: Annotated[
        Path | None, Option(metavar="PATH", help="Checkpoint of the draft, or with --gpu its config.json.")
    ] = None
    gpu: Annotated[
        str | None,
        Option(
            metavar="GPU[:N]",
            help=f"GPUs of a target's replica: {', '.join(GPUS)}; N of a node, 1 by default. "
            "With it nothing but each config.json is read.",
            rich_help_panel=PANEL,
        ),
    ] = None
    draft_gpu: Annotated[
        str | None, Option(metavar="GPU[:N]", help="GPUs of a draft's replica.", rich_help_panel=PANEL)
    ] = None
    kv_dtype: Annotated[
        KVDtype | None,
        Option(help="Type of the target's KV, in place of bfloat16 (target.engine.kv_dtype).", rich_help_panel=PANEL),
    ] = None
    draft_kv_dtype: Annotated[
        KVDtype | None, Option(help="Type of the draft's KV (draft.engine.kv_dtype).", rich_help_panel=PANEL)
    ] = None
    rate: Annotated[
        float | None,
        number(Range(0, 1e6, excludes_low=True), "Requests that arrive in a second", metavar="RATE", panel=PANEL),
    ] = None
    prompt_tokens: Annotated[
        int, number(Range(1, 10**7, is_whole=True), "Length of each prompt, in tokens", panel=PANEL)
    ] = 1000
    output_tokens: Annotated[
        int, number(Range(1, 10**6, is_whole=True), "Length of each output, in tokens", panel=PANEL)
    ] = 300
    itl_ms: Annotated[
        float,
        number(Range(0, 1e5, excludes_low=True), "Longest time between tokens, in milliseconds", panel=PANEL),
    ] = 50.0
    acceptance: Annotated[
        float | None,
        number(
            Range(0, 1),
            "Share of the draft's tokens that the target accepts; by default as recorded from the demo pair",
            metavar="A",
            panel=PANEL,
        ),
    ] = None
    dollars: Annotated[
        float | None,
        number(Range(0, 1e4), "Price of an hour of one of the target's GPUs, in place of a round one", panel=PANEL),
    ] = None
    draft_dollars: Annotated[
        float | None,
        number(Range(0, 1e4), "Price of an hour of one of the draft's GPUs, in place of a round one", panel=PANEL),
    ] = None


@dataclass(frozen=True, slots=True)
class Role:
    """A model on its GPUs."""

    name: str
    model: Path
    outline: Outline
    gpu: str
    placed: Placed
    kv_tokens: int
    num_states: int
    """States of recurrent layers that fit; 0 without such layers."""

    def share_of(self, streams: int, tokens_each: int) -> float:
        """Share of KV, or of states, that these streams need; above 1 if they do not fit."""
        by_states = streams * STATES_BESIDE_GUESSES / self.num_states if self.outline.shape.state_bytes else 0.0
        return max(by_states, streams * tokens_each / self.kv_tokens)


@dataclass(frozen=True, slots=True)
class Sizing:
    """A steady load, and the replicas for it."""

    streams: int
    """Streams that a target's replica decodes at once."""
    requests_per_s: float
    """Capacity of a target's replica with plain decoding."""
    num_targets: int
    num_drafts: int
    dollars: float
    """Price of an hour of all replicas."""
    dollars_a_million: float
    """Price of a million tokens of output at this load; without a rate, at the load of one replica."""


@dataclass(frozen=True, slots=True)
class Needs:
    target: Role
    draft: Role | None
    load: Sizing
    gain: Comparison | None
    """One stream, simulated; None without a draft."""


def needs_of(options: NeedsOptions, gpu: str) -> Needs:
    """The needs of the pair of `options`, with the target on `gpu`.

    Raises: ConfigError, which names the option; UnsupportedModel, CheckpointError for a model that cannot be served.
    """
    target = _role("target", options.target, gpu, options.dollars, options.kv_dtype)
    draft = _draft(options)
    _check_context(options, target)
    if draft is not None:
        check_vocabularies(target, draft)
    gain = None if draft is None else compare(scenario(target, draft, options))
    return Needs(target, draft, _load(target, draft, options), gain)


def _draft(options: NeedsOptions) -> Role | None:
    if options.draft is None:
        if any(each is not None for each in (options.draft_gpu, options.acceptance, options.draft_kv_dtype)):
            raise ConfigError("--draft-gpu, --acceptance and --draft-kv-dtype need --draft")
        return None
    if options.draft_gpu is None:
        raise ConfigError("--draft-gpu is needed: the GPU that --draft will run on")
    return _role("draft", options.draft, options.draft_gpu, options.draft_dollars, options.draft_kv_dtype)


def _check_context(options: NeedsOptions, target: Role) -> None:
    length, limit = options.prompt_tokens + options.output_tokens, target.outline.max_context_tokens
    if length > limit:
        raise ConfigError(f"--prompt-tokens and --output-tokens: {length} tokens, more than the target's {limit}")
    if length > target.kv_tokens:
        raise ConfigError(f"--prompt-tokens and --output-tokens: {length} tokens, and {target.kv_tokens} fit into KV")


def check_vocabularies(target: Role, draft: Role) -> None:
    """Compare the tokenizers if both are there. Raises: ConfigError, CheckpointError."""
    from workers.vocabulary import check_same_vocabulary

    if all((role.model / "tokenizer.json").is_file() for role in (target, draft)):
        check_same_vocabulary(target.model, draft.model)


def _role(name: str, model: Path, gpu: str, dollars: float | None, kv_dtype: KVDtype | None) -> Role:
    """Raises: ConfigError, UnsupportedModel, CheckpointError."""
    from workers.model import outline_of  # imports torch

    prefix = "--" if name == "target" else "--draft-"
    option = f"{prefix}gpu"
    kind, count = parse_gpu(option, gpu)
    sheet = GPUS[kind] if dollars is None else replace(GPUS[kind], dollars=dollars)
    if kv_dtype is not None and sheet.capability < FP8_CAPABILITY:
        raise ConfigError(f"{prefix}kv-dtype {kv_dtype} needs a GPU of compute capability 8.9 or more, unlike {kind}")
    config = EngineConfig(str(model), dtype="bfloat16", tensor_parallel=count, device="cuda", kv_dtype=kv_dtype)
    found = outline_of(config)
    placed = Placed(found.shape, sheet, count)
    kv_tokens = placed.kv_tokens(STEP_TOKENS)
    if kv_tokens < 1:
        enough = (each for each in COUNTS if Placed(found.shape, sheet, each).kv_tokens(STEP_TOKENS) > 0)
        more = next((f"{option} {kind}:{each} has room" for each in enough), f"nor do 8 {kind}: use a larger GPU")
        size = f"{found.shape.weight_bytes / 1e9:,.1f} GB of weights in bfloat16"
        raise UnsupportedModel(f"the {name} does not fit on {count} {kind}: {size} and a step; {more}")
    num_states = placed.num_states(STEP_TOKENS)
    if found.shape.state_bytes and num_states <= STATES_BESIDE_GUESSES:
        raise UnsupportedModel(
            f"the {name} has no room for the states of one stream on {count} {kind}: use a larger GPU"
        )
    return Role(name, model, found, kind, placed, kv_tokens, num_states)


def parse_gpu(option: str, text: str) -> tuple[str, int]:
    """The name and number of GPUs in a text like h200:4. Raises: ConfigError."""
    name, colon, count = text.lower().partition(":")
    if name not in GPUS or (count if colon else "1") not in map(str, COUNTS):
        allowed = f"one of {', '.join(GPUS)}, with :{', :'.join(map(str, COUNTS[1:]))} for several of a node"
        raise ConfigError(f"{option} must be {allowed}, got {text!r}")
    return name, int(count or 1)


# Speed and load


def scenario(target: Role, draft: Role, options: NeedsOptions) -> Scenario:
    """One stream at a time on these GPUs."""
    context = _context(options)
    by_target, by_draft = (EngineLaw(role.placed.law(context), STEP_TOKENS) for role in (target, draft))
    return Scenario(
        hardware=Hardware("", by_target, by_draft, HOP, HOP),
        law=None if options.acceptance is None else steady_law(options.acceptance, 0.0),
        load=Closed(1, NUM_SIMULATED),
        prompt_tokens=min(options.prompt_tokens, 4096),
        max_tokens=max(2, min(options.output_tokens, SIMULATED_TOKENS)),
        speculation=SpeculationConfig(guessers=("draft",)),
    )


def _load(target: Role, draft: Role | None, options: NeedsOptions) -> Sizing:
    streams = _streams(target, options)
    requests_per_s = _requests_per_s(target.placed, streams, options)
    num_targets = 1 if options.rate is None else ceil(options.rate / (USED_SHARE * requests_per_s))
    # A draft too slow for all streams drafts less, and none waits for it: only its KV asks for more than one a target.
    length = options.prompt_tokens + options.output_tokens
    kv_share = 0.0 if draft is None else draft.share_of(streams, length)
    num_drafts = 0 if draft is None else ceil(num_targets * max(1.0, kv_share))
    roles = ((target, num_targets), (draft, num_drafts))
    dollars = sum(role.placed.dollars * num for role, num in roles if role is not None)
    rate = USED_SHARE * requests_per_s if options.rate is None else options.rate
    a_million = dollars / (rate * options.output_tokens * 3600) * 1e6
    return Sizing(streams, requests_per_s, num_targets, num_drafts, dollars, a_million)


def _context(options: NeedsOptions) -> int:
    """Tokens of a stream, on average over its output."""
    return options.prompt_tokens + options.output_tokens // 2


def _streams(target: Role, options: NeedsOptions) -> int:
    """The most streams whose KV and states fit, and whose steps are as short as `itl_ms` says; at least 1."""
    room = min(MAX_STREAMS, int(1 / target.share_of(1, options.prompt_tokens + options.output_tokens)))
    context, longest_s = _context(options), options.itl_ms / 1e3
    allowed = (num for num in range(room, 1, -1) if target.placed.step_s(num, num * context) <= longest_s)
    return next(allowed, 1)


def _requests_per_s(placed: Placed, streams: int, options: NeedsOptions) -> float:
    """Requests that a replica completes: each one's prompt is computed beside `streams` streams that decode."""
    prompt_s = options.prompt_tokens * placed.step_s(STEP_TOKENS) / STEP_TOKENS
    decode_s = options.output_tokens * placed.step_s(streams, streams * _context(options))
    each_s: float = decode_s + streams * prompt_s
    return streams / each_s
