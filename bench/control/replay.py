"""Recorded texts, decoded by the real orchestrator on a virtual clock, in any way of guessing.

Passes take as long as those of a 70B and a 1B (preset "70b+1b"). A second draft is as fast as the first. If a guesser
asks the target questions, the demo target answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from bench.control.recorder import Recorder
from core.config import SpeculationConfig
from core.records import GenerationRequest, Grammar, Sampling
from core.speculation import TokenTree
from deploy.measure import Recording
from simulation.clock import new_loop
from simulation.engines import PRESETS, Agreement, Text
from simulation.engines.texts import TextPosition
from simulation.measure import Report, StreamRecord, sum_up
from simulation.rig import Blueprint, Rig
from workers.grammar import GrammarState

HARDWARE = PRESETS["70b+1b"]


@dataclass(frozen=True, eq=False, slots=True)
class ReplayLaw:
    """Text `seed` replays recording `seed`. It repeats after its end; only positions outside the text get that far."""

    texts: Sequence[Sequence[Agreement]]

    def at(self, seed: int, index: int, depth: int = 0) -> Agreement:  # noqa: ARG002
        positions = self.texts[seed]
        return positions[index % len(positions)]

    def num_accepted_of_block(self, seed: int, index: int, num_guesses: int) -> int | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class Job:
    """One text to decode."""

    text: Recording
    temperature: float
    agreements: tuple[Sequence[Agreement], ...]
    """Agreements of each draft."""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class ReplayText(Text):
    """A text of the recorded tokens, so that guessers find real repetitions."""

    jobs: Sequence[Job] = ()
    recorder: Recorder | None = None
    """Provides the target that answers questions."""
    states: dict[int, GrammarState | None] = field(default_factory=dict)

    def _position(self, prefix_hash: int, index: int, seed: int, is_true: bool) -> TextPosition:
        position, output = Text._position(self, prefix_hash, index, seed, is_true), self.jobs[seed].text.output
        return replace(position, next_token=output[index]) if is_true and index < len(output) else position

    def samples(self, block: TokenTree, root: TextPosition) -> tuple[int, ...]:
        if self.recorder is None:
            return Text.samples(self, block, root)
        job = self.jobs[root.seed]
        text, sampling = job.text, Sampling(temperature=job.temperature, seed=root.seed)
        if root.seed not in self.states:
            self.states[root.seed] = self.recorder.state(job.grammar)
        tokens = [*text.prompt, *text.output[: root.index]]
        return self.recorder.target.samples(tokens, len(text.prompt), block, sampling, self.states[root.seed])


@dataclass(frozen=True, slots=True)
class GuessingWay:
    """A choice of sources, and their settings."""

    speculation: SpeculationConfig
    drafts: tuple[int, ...] = (0,)
    """Indices of the recorded drafts that guess."""


PLAIN_WAY = GuessingWay(SpeculationConfig(max_draft_tokens=0))


@dataclass(frozen=True, slots=True)
class Decoded:
    """Results of decoding in one way."""

    report: Report
    drafted: Mapping[str, int]
    """Number of verified guesses, by source."""
    accepted: Mapping[str, int]
    """Number of accepted guesses, by source."""
    first_accepted: float
    """Share of rounds whose first guess was accepted."""

    @property
    def rate(self) -> float:
        return self.report.tokens_per_s_a_stream


def decode(
    jobs: Sequence[Job], way: GuessingWay, vocab_size: int, recorder: Recorder | None = None, num_before: int = 0
) -> Decoded:
    """Decode the texts one after the other, with one service that learns. The first `num_before` are not counted.

    Raises: RuntimeError if an output differs from the recording.
    """
    loop = new_loop()
    grammars = recorder.grammars if recorder is not None else None
    rig = Rig(_blueprint(jobs, way, vocab_size, recorder), loop, Random(0), grammars=grammars)

    async def run() -> Decoded:
        try:
            streams = [await _stream(rig, job, number, loop.time) for number, job in enumerate(jobs)][num_before:]
            return _decoded(streams, sum_up(streams, rig.cluster, rig.service.report()))
        finally:
            await rig.service.close()

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def _blueprint(jobs: Sequence[Job], way: GuessingWay, vocab_size: int, recorder: Recorder | None) -> Blueprint:
    texts = [
        ReplayText(ReplayLaw([job.agreements[draft] for job in jobs]), vocab_size, jobs=jobs, recorder=recorder)
        for draft in way.drafts
    ]
    return Blueprint(
        HARDWARE,
        texts[0],
        other_drafts=tuple(texts[1:]),
        speculation=way.speculation,
    )


async def _stream(rig: Rig, job: Job, number: int, now: Callable[[], float]) -> StreamRecord:
    """Decode one text. Its number is its seed, by which the simulated pair identifies the text."""
    stream, tokens = StreamRecord(started_s=now()), list[int]()
    request = GenerationRequest(
        f"text-{number}",
        job.text.prompt,
        Sampling(temperature=job.temperature, seed=number),
        max_tokens=len(job.text.output),
        ignore_eos=True,
        wants_trace=True,
        grammar=job.grammar,
    )
    async for chunk in rig.service.generate(request):
        stream.take(chunk, now())
        tokens += chunk.token_ids
    if tuple(tokens) != job.text.output:
        raise RuntimeError(f"text {number} came out changed")
    return stream


def _decoded(streams: Sequence[StreamRecord], report: Report) -> Decoded:
    drafted, accepted = Counter[str](), Counter[str]()
    num_rounds = num_first = 0
    for stats in (stream.stats for stream in streams if stream.stats is not None):
        num_rounds += stats.num_rounds - 1
        num_first += stats.accepted_per_position[0] if stats.accepted_per_position else 0
        for source in stats.sources:
            drafted[source.name] += source.num_drafted_tokens
            accepted[source.name] += source.num_accepted_tokens
    return Decoded(report, drafted, accepted, num_first / max(1, num_rounds))
