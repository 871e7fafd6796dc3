"""Measures a pair on prompts: what each source of guesses agrees with, how long passes take, what memory they cost.

Puts models, guessers and the laws of verification together; must not know how figures are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from core.config import EngineConfig, SpeculationConfig
from core.errors import ConfigError
from core.records import Sampling, Verification
from core.speculation import DRAFT, Guesser
from deploy.measure.agreement import Agreement, GuesserAgreement, coupled, of_guesser, rejection
from deploy.measure.prediction import Guessing, Timing
from deploy.measure.recording import MeasuredModel, Recording, record
from orchestrator.guessers import ASKING, BY_TEXT, GUESSERS, Means, available_sources

THIS_MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    target: EngineConfig
    draft: EngineConfig | None
    prompts: Sequence[Sequence[int]]
    temperatures: Sequence[float]
    num_tokens: int
    """Of each output, at most."""
    depth: int
    """Guesses in a row, at most."""
    q_top_tokens: int = SpeculationConfig().q_top_tokens
    """What the draft's q is cut to in rejection verification."""
    draft_temperature: float | None = None
    """Of the draft alone, where the target samples; None for the target's."""

    @property
    def num_steps(self) -> int:
        """Times that progress is told."""
        return (2 if self.draft is not None else 1) * 2 + len(self.temperatures) * len(self.prompts)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of guesses under one verification, at one temperature."""

    name: str
    temperature: float
    verification: Verification
    """Greedy decoding is the same under all of them, and stands under coupled."""
    agreement: Agreement
    guess_s: float | None
    """Of a proposal; None for the draft."""

    @property
    def guessing(self) -> Guessing:
        return Guessing(self.agreement.rates, self.guess_s)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one model."""

    weights_bytes: int
    kv_bytes_a_token: int


@dataclass(frozen=True, slots=True)
class Survey:
    """All that was measured."""

    sources: Sequence[Source]
    timing: Timing
    """Of this machine."""
    memory: Mapping[str, Memory]
    """By role."""
    num_tokens: Mapping[float, int]
    """Written, by temperature."""


def survey(plan: Plan, progress: Callable[[str], None]) -> Survey:
    """Measure; `progress` is told what has been done, `plan.num_steps` times.

    Raises: StartupError for models that cannot be served; ConfigError for a prompt that is too long for one.
    """
    models = dict(_loaded(plan, progress))
    _check_lengths(plan, models)
    target, draft = models["target"], models.get(DRAFT)
    laws = {}
    for role, model in models.items():
        laws[role] = model.pass_law()
        progress(f"timed passes of the {role}")
    sources, num_tokens = list[Source](), dict[float, int]()
    for temperature in plan.temperatures:
        texts = list(_texts(plan, target, draft, temperature, progress))
        sources += _sources(plan, texts, temperature)
        num_tokens[temperature] = sum(len(text.output) for text in texts)
    memory = {role: Memory(model.weights_bytes, model.kv_bytes_a_token) for role, model in models.items()}
    return Survey(sources, Timing(THIS_MACHINE, laws["target"], laws.get(DRAFT)), memory, num_tokens)


def _loaded(plan: Plan, progress: Callable[[str], None]) -> Iterator[tuple[str, MeasuredModel]]:
    for role, config in {"target": plan.target, DRAFT: plan.draft}.items():
        if config is not None:
            yield role, MeasuredModel(config)
            progress(f"loaded the {role}")


def _check_lengths(plan: Plan, models: Mapping[str, MeasuredModel]) -> None:
    for role, model in models.items():
        room = model.info.max_context_tokens - plan.num_tokens
        for number, prompt in enumerate(plan.prompts, 1):
            if len(prompt) > room:
                raise ConfigError(
                    f"--prompts: prompt {number} has {len(prompt)} tokens, and with --tokens {plan.num_tokens} that is "
                    f"more than the {role}'s context of {model.info.max_context_tokens}"
                )


def _texts(
    plan: Plan,
    target: MeasuredModel,
    draft: MeasuredModel | None,
    temperature: float,
    progress: Callable[[str], None],
) -> Iterator[Recording]:
    """Each prompt has a seed of its own."""
    for number, prompt in enumerate(plan.prompts):
        sampling = Sampling(temperature=temperature, seed=number)
        yield record(target, draft, prompt, sampling, plan.num_tokens, plan.draft_temperature)
        progress(f"prompt {number + 1} of {len(plan.prompts)} at T = {temperature:g}")


def _sources(plan: Plan, texts: Sequence[Recording], temperature: float) -> Iterator[Source]:
    if plan.draft is not None:
        found = _sum([coupled(text.guesses, text.output, plan.depth) for text in texts])
        yield Source(DRAFT, temperature, Verification.COUPLED, found, None)
        if temperature:
            yield Source(DRAFT, temperature, Verification.REJECTION, _sum(_rejections(plan, texts)), None)
    for name, new in guessers(plan.depth).items():
        total = _of_guesser(new, texts, plan.depth)
        yield Source(name, temperature, Verification.COUPLED, total.coupled, total.guess_s)
        if temperature:
            yield Source(name, temperature, Verification.REJECTION, total.rejection, total.guess_s)


def _rejections(plan: Plan, texts: Sequence[Recording]) -> list[Agreement]:
    return [
        rejection(text.log_p, text.log_q, text.output, plan.q_top_tokens, plan.depth)
        for text in texts
        if text.log_q is not None
    ]


def _sum(agreements: Sequence[Agreement]) -> Agreement:
    first, *others = agreements
    for each in others:
        first += each
    return first


def _of_guesser(new: Callable[[], Guesser], texts: Sequence[Recording], depth: int) -> GuesserAgreement:
    """A guesser of its own for each text, as each session has."""
    first, *others = (of_guesser(new(), text.prompt, text.output, text.log_p, depth) for text in texts)
    for each in others:
        first += each
    return first


def guessers(depth: int) -> Mapping[str, Callable[[], Guesser]]:
    """Those that need no more than the text, by name, as the default settings have them: each makes one session's."""
    means = Means(SpeculationConfig(), depth)
    names = [name for name in available_sources(means.config) if name in BY_TEXT and name not in ASKING]
    return {name: partial(GUESSERS[name], means) for name in names}
