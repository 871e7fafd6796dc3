"""Measures a pair on prompts: the acceptance of each source of guesses, the time of passes, and the memory of models.

Puts models, guessers and the rules of verification together; must not know how figures are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add

from core.config import EngineConfig, SpeculationConfig
from core.errors import ConfigError
from core.records import Sampling, Verification
from core.speculation import DRAFT, Guesser
from deploy.measure.agreement import Agreement, GuesserAgreement, coupled, of_guesser, rejection
from deploy.measure.prediction import Timing
from deploy.measure.recording import MeasuredModel, Recording, record
from orchestrator.guessers import ASKING, BY_TEXT, CONTROLS, GUESSERS, GuesserInputs, available_sources

THIS_MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class Plan:
    """The input of a survey."""

    target: EngineConfig
    draft: EngineConfig | None
    prompts: Sequence[Sequence[int]]
    temperatures: Sequence[float]
    num_tokens: int
    """Largest number of tokens of each output."""
    depth: int
    """Largest number of guesses in a row."""
    q_top_tokens: int = SpeculationConfig().q_top_tokens
    """Largest number of tokens of the draft's q in rejection verification."""
    draft_temperature: float | None = None
    """Temperature of the draft where the target samples; None for the target's own."""

    @property
    def num_steps(self) -> int:
        """The number of times that progress is reported."""
        return (2 if self.draft is not None else 1) * 2 + len(self.temperatures) * len(self.prompts)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of guesses under one verification, at one temperature."""

    name: str
    temperature: float
    verification: Verification
    """At temperature 0 all rules decide alike; results are listed under `coupled`."""
    agreement: Agreement
    guess_s: float | None
    """Seconds of a proposal; None for the draft."""


@dataclass(frozen=True, slots=True)
class Memory:
    weights_bytes: int
    kv_bytes_a_token: int


@dataclass(frozen=True, slots=True)
class Survey:
    """The results of a survey."""

    sources: Sequence[Source]
    timing: Timing
    """Pass times on this machine."""
    memory: Mapping[str, Memory]
    """Memory by role: target or draft."""
    num_tokens: Mapping[float, int]
    """The number of tokens written, by temperature."""


def survey(plan: Plan, progress: Callable[[str], None]) -> Survey:
    """Measure the pair; `progress` gets a line for each step that is done, `plan.num_steps` in all.

    Raises: StartupError for models that cannot be served; ConfigError for a prompt that is too long for a model.
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
                    f"--prompts: prompt {number} has {len(prompt)} tokens; with --tokens {plan.num_tokens} it exceeds "
                    f"the {role}'s context of {model.info.max_context_tokens}: shorten it, or lower --tokens"
                )


def _texts(
    plan: Plan,
    target: MeasuredModel,
    draft: MeasuredModel | None,
    temperature: float,
    progress: Callable[[str], None],
) -> Iterator[Recording]:
    """A recording of each prompt, each with its own seed."""
    for number, prompt in enumerate(plan.prompts):
        sampling = Sampling(temperature=temperature, seed=number)
        yield record(target, draft, prompt, sampling, plan.num_tokens, plan.draft_temperature)
        progress(f"prompt {number + 1} of {len(plan.prompts)} at T = {temperature:g}")


def _sources(plan: Plan, texts: Sequence[Recording], temperature: float) -> Iterator[Source]:
    if plan.draft is not None:
        found = reduce(add, [coupled(text.guesses, text.output, plan.depth) for text in texts])
        yield Source(DRAFT, temperature, Verification.COUPLED, found, None)
        if temperature:
            yield Source(DRAFT, temperature, Verification.REJECTION, reduce(add, _rejections(plan, texts)), None)
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


def _of_guesser(new: Callable[[], Guesser], texts: Sequence[Recording], depth: int) -> GuesserAgreement:
    """The agreement of a guesser over all texts; each text has a new guesser, as each session does."""
    return reduce(add, [of_guesser(new(), text.prompt, text.output, text.log_p, depth) for text in texts])


def guessers(depth: int) -> Mapping[str, Callable[[], Guesser]]:
    """The guessers that need only the text, by name, with default settings; each value makes one session's guesser."""
    inputs = GuesserInputs(SpeculationConfig(), depth)
    names = [name for name in available_sources(inputs.config) if name in BY_TEXT and name not in {*ASKING, *CONTROLS}]
    return {name: partial(GUESSERS[name], inputs) for name in names}
