"""The script of a seed: the cluster, settings, streams and faults of one chaotic run.

Knows randomness and records; runs nothing. Times and sizes are small, so that thousands of scripts run in a minute, and
vary, so that drafts are early, late or absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import get_args

from core.config import Limits, SpeculationConfig
from core.costs import PassLaw
from core.records import FinishReason, GenerationRequest, Policy, Sampling, Verification
from orchestrator.guessers import SOURCES, available_sources
from simulation.chaos.engine_faults import BREAKDOWNS, EngineFault, TimedFault
from simulation.chaos.faults import Rates
from simulation.engines import EOS, EngineLaw, Hardware, HopLaw, SteadyLaw, Text
from simulation.rig import Blueprint

FAULTS_UNTIL_S = 2.0
RELAXED_SHARE = 0.15
EXACT_CHOICES = (*[Verification.COUPLED] * 3, Verification.REJECTION, Verification.BLOCK)
INFALLIBLE = SteadyLaw((1.0,), (1.0,), alpha=1.0)


@dataclass(frozen=True, slots=True)
class StreamScript:
    """One client: its request, its expected output, and its behaviour."""

    request: GenerationRequest
    expected: tuple[int, ...]
    """The whole output, including resumed tokens; under a relaxed rule, the output of plain decoding."""
    reason: FinishReason
    start_s: float
    pause_s: float
    """Seconds between chunks; above 0 for a slow reader."""
    cancel_after_s: float | None
    text: Text
    has_infallible_draft: bool
    """Whether the draft is always right and drafts only chains. Then no guess may be rejected."""


@dataclass(frozen=True, slots=True)
class Script:
    seed: int
    blueprint: Blueprint
    rates: Rates
    timed_faults: tuple[TimedFault, ...]
    streams: tuple[StreamScript, ...]
    shutdown_s: float | None


def script_of(seed: int, *, has_heads: bool = False) -> Script:
    """The script of a seed, the same on every machine. With `has_heads`, the same with heads, and with their faults."""
    script = _script_of(seed)
    return _with_heads(script) if has_heads else script


def _script_of(seed: int) -> Script:
    random = Random(f"chaos {seed}")  # noqa: S311  randomness must be reproducible
    is_infallible = random.random() < 0.25
    speculation = _speculation(random)
    if is_infallible:
        speculation = replace(speculation, policy="static", guessers=("draft",))
    blueprint = _blueprint(random, INFALLIBLE if is_infallible else _law(random), speculation)
    if blueprint.num_drafts and not is_infallible:
        blueprint = replace(blueprint, num_extra_drafts=int(seed % 5 == 0))
    rates = _rates(random)
    return Script(
        seed,
        blueprint,
        replace(rates, corrupts_drafts=False) if is_infallible else rates,
        tuple(_timed_fault(random, blueprint) for _ in range(random.choice((0, 0, 1, 2, 4)))),
        _relaxed(
            seed, [_stream(random, blueprint.text, n, is_infallible, seed) for n in range(random.randrange(2, 6))]
        ),
        shutdown_s=random.uniform(0.0, 1.0) if random.random() < 0.05 else None,
    )


def _with_heads(script: Script) -> Script:
    """Make drafts heads, on draft engines, in the target's or at both places, and add a few more faults of theirs."""
    random = Random(f"heads {script.seed}")  # noqa: S311  as above
    blueprint, streams = script.blueprint, script.streams
    has_other = not any(stream.has_infallible_draft for stream in streams) and random.random() < 0.3
    blueprint = replace(
        blueprint,
        num_drafts=max(1, blueprint.num_drafts),
        num_extra_drafts=0 if has_other else blueprint.num_extra_drafts,
        other_drafts=(replace(blueprint.text, law=_law(random)),) if has_other else (),
        heads=random.choice((frozenset({0}), frozenset({1}), frozenset({0, 1}))) if has_other else frozenset({0}),
        reads_prefix=random.random() < 0.7,
        has_target_head=random.random() < 0.5,
        speculation=replace(blueprint.speculation, guessers=_with_head(blueprint.speculation.guessers)),
    )
    return replace(
        script,
        blueprint=blueprint,
        rates=replace(script.rates, features=random.choice((0.0, 0.05, 0.2))),
        timed_faults=(*script.timed_faults, *_head_faults(random, blueprint)),
        streams=tuple(_asking_heads(stream) for stream in streams),
    )


def _with_head(guessers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("draft", *guessers, *(("head",) if len(guessers) > 1 else ()))))


def _asking_heads(stream: StreamScript) -> StreamScript:
    asked = stream.request.guessers
    return replace(stream, request=replace(stream.request, guessers=_with_head(asked))) if asked else stream


def _head_faults(random: Random, blueprint: Blueprint) -> Iterator[TimedFault]:
    """Faults of the engines of heads, and deaths of targets, whose features then have to come from others."""
    kinds = [("draft", blueprint.num_drafts), ("target", blueprint.num_targets)]
    kinds += [("draft 2", 1)] * len(blueprint.other_drafts)
    for _ in range(random.choice((0, 1, 2))):
        kind, num_engines = random.choice(kinds)
        fault = random.choice(list(EngineFault))
        lasts_s = random.uniform(0.0, 0.5)
        yield TimedFault(random.uniform(0.0, 1.0), lasts_s, kind, random.randrange(num_engines), fault)


def _law(random: Random) -> SteadyLaw:
    rank = random.uniform(0.3, 0.95)
    return SteadyLaw((rank, (1 - rank) / 2, (1 - rank) / 4), (rank, (1 - rank) / 3), alpha=rank)


def _blueprint(random: Random, law: SteadyLaw, speculation: SpeculationConfig) -> Blueprint:
    target_s, ratio = random.uniform(0.005, 0.03), random.choice((0.02, 0.1, 0.1, 0.3, 1.0))
    return Blueprint(
        Hardware(
            "drawn",
            EngineLaw(PassLaw.flat(target_s, 64), max_step_tokens=random.choice((64, 512))),
            EngineLaw(PassLaw.flat(target_s * ratio, 64)),
            _hop(random),
            _hop(random),
        ),
        Text(law, vocab_size=random.choice((16, 1000)), eos_share=random.choice((0.0, 0.0, 0.03))),
        num_targets=random.choice((1, 1, 2, 3)),
        num_drafts=random.choice((0, *[1] * 7, *[2] * 3)),
        speculation=speculation,
        limits=Limits(
            max_sessions=random.choice((1, 2, *[16] * 6)),
            max_queued=random.choice((0, 1, 128)),
            max_target_retries=random.choice((0, 3, *[20] * 6)),
            lease_timeout_s=random.uniform(0.5, 3.0),
            reply_timeout_s=random.uniform(1.0, 3.0),
        ),
    )


def _hop(random: Random) -> HopLaw:
    return HopLaw(random.choice((0.0, 0.001, 0.02)), jitter=random.choice((0.0, 0.3, 2.0)))


def _speculation(random: Random) -> SpeculationConfig:
    return SpeculationConfig(
        policy=random.choice(get_args(Policy)),
        pipelining=random.random() < 0.85,
        max_draft_tokens=random.choice((0, 1, 2, 3, 3, 4, 4, 5, 6)),
        max_block_tokens=random.choice((1, 4, 8, 12)),
        guessers=_guessers(random.random(), available_sources(SpeculationConfig())),
        draft_timeout_s=random.choice((random.uniform(0.001, 0.05), 0.3)),
        draft_retry_s=random.uniform(0.001, 0.1),
        breaker_rounds=random.choice((1, 2, 3, 10)),
    )


def _guessers(chance: float, names: tuple[str, ...]) -> tuple[str, ...]:
    """Half of the time the draft alone; else all sources, the draft and one guesser, or guessers alone."""
    guessers = names[1:]
    choices = (names, ("draft", guessers[0]), ("draft", guessers[-1]), guessers)
    return ("draft",) if chance >= 0.5 else choices[int(chance * 2 * len(choices))]


def _rates(random: Random) -> Rates:
    def often() -> float:
        return random.choice((0.0, 0.0, 0.02, 0.1))

    return Rates(
        FAULTS_UNTIL_S,
        target=often(),
        draft=0.6 if random.random() < 0.1 else often() * 1.5,
        refused_target=often() / 4,
        refused_draft=often() * 1.5,
        slow_grant=often(),
        echo=often() * 2,
        mean_delay_s=random.choice((0.01, 0.2)),
    )


def _timed_fault(random: Random, blueprint: Blueprint) -> TimedFault:
    kind = "draft" if blueprint.num_drafts and random.random() < 0.6 else "target"
    index = random.randrange(blueprint.num_drafts if kind == "draft" else blueprint.num_targets)
    lasts_s = random.choice((0.0, random.uniform(0.0, 0.2), random.uniform(0.0, 2.0)))
    return TimedFault(random.uniform(0.0, 1.0), lasts_s, kind, index, random.choice(BREAKDOWNS))


def _stream(random: Random, text: Text, number: int, has_infallible_draft: bool, seed: int) -> StreamScript:
    prompt = tuple(random.randrange(1, text.vocab_size) for _ in range(random.choice((1, 5, 20, 90))))
    sampling = Sampling(temperature=random.choice((0.0, 1.0)), seed=random.getrandbits(64))
    max_tokens, start_s = random.randrange(1, 36), random.choice((0.0, random.uniform(0.0, 0.5)))
    stop_ids = frozenset({random.randrange(1, 16)}) if random.random() < 0.1 else frozenset[int]()
    ignore_eos = random.random() < 0.2
    expected, reason = ending_of(text.plain(prompt, sampling.seed, max_tokens), stop_ids, ignore_eos)
    num_resumed = random.randrange(len(expected) + 1) if random.random() < 0.15 else 0
    request = GenerationRequest(
        f"stream-{number}",
        prompt,
        sampling,
        max_tokens,
        verification=random.choice(EXACT_CHOICES),
        max_draft_tokens=random.choice((*[None] * 8, 0, 2)),
        policy=None if has_infallible_draft else random.choice((*[None] * 8, *get_args(Policy))),
        pipelining=None if has_infallible_draft else random.choice((*[None] * 4, True, False)),
        guessers=() if has_infallible_draft else _own_guessers(Random(f"guessers {seed} {number}")),  # noqa: S311
        resume_tokens=expected[:num_resumed],
        stop_token_ids=stop_ids,
        ignore_eos=ignore_eos,
        num_logprobs=random.choice((None, None, 0)),
        wants_trace=has_infallible_draft or random.random() < 0.2,
        deadline=start_s + random.uniform(0.0, 2.0) if random.random() < 0.1 else None,
    )
    pause_s = random.choice((0.0, 0.0, 0.0, random.uniform(0.0, 0.2)))
    cancel_after_s = random.uniform(0.0, 1.0) if random.random() < 0.15 else None
    return StreamScript(request, expected, reason, start_s, pause_s, cancel_after_s, text, has_infallible_draft)


def _own_guessers(random: Random) -> tuple[str, ...]:
    """Guessers named by the request itself, often none."""
    return _guessers(random.random(), SOURCES) if random.random() < 0.2 else ()


def _relaxed(seed: int, streams: Sequence[StreamScript]) -> tuple[StreamScript, ...]:
    """Give some streams a relaxed rule. Uses a random source of its own, so that nothing else changes."""
    random = Random(f"relaxed {seed}")  # noqa: S311  as above
    return tuple(_with_relaxed_rule(random, each) if random.random() < RELAXED_SHARE else each for each in streams)


def _with_relaxed_rule(random: Random, stream: StreamScript) -> StreamScript:
    verification = random.choice([each for each in Verification if not each.rule.is_lossless])
    lenience = random.choice((1.0, 0.5, 0.2)) if verification.rule.takes_lenience else 1.0
    request = replace(stream.request, verification=verification, lenience=lenience, resume_tokens=())
    return replace(stream, request=request)


def ending_of(
    tokens: Sequence[int], stop_ids: frozenset[int], ignore_eos: bool
) -> tuple[tuple[int, ...], FinishReason]:
    """The output up to its end, and why it ends there."""
    ending = stop_ids if ignore_eos else stop_ids | {EOS}
    for index, token in enumerate(tokens):
        if token in ending:
            return tuple(tokens[: index + 1]), FinishReason.STOP
    return tuple(tokens), FinishReason.LENGTH
