"""Every guesser on every kind of text: acceptance, cost, speed over plain decoding, and the speed that theory predicts.

The real orchestrator runs on a virtual clock with passes of a 70B and a 1B (preset "70b+1b"), one stream at a time. The
first half of the texts is not counted, because the service still learns. Texts and the drafts' agreement with them are
recorded from the demo pair (`bench.control.workload_texts`, `recorder`, `replay`). The processor time of guesses is
measured separately and not part of the virtual time: a pass of the target takes 500 times as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.control.alone import measure_guesser
from bench.control.guesser_table import Row, draw, table
from bench.control.recorder import Recorded, Recorder
from bench.control.replay import PLAIN_WAY, Decoded, GuessingWay, Job, decode
from bench.control.workload_texts import Workload, workloads
from bench.results import Result, at_least, named, say
from core.config import SpeculationConfig
from core.speculation import DRAFT, Guesser
from core.theory import expected_tokens
from deploy.measure import Recording
from deploy.settings import DEMO_DIRECTORY
from models.train.corpus import load_split
from orchestrator.guessers import ASKING, CONTROLS, GUESSERS, CorpusIndex, GuesserInputs, encode_index, write_index
from orchestrator.text import Tokenizer

DEPTH = SpeculationConfig().max_draft_tokens
AUTOMATIC, SECOND_DRAFT, TWO_DRAFTS = "automatic", "second draft", "two drafts"
MIX = "all of them mixed"
WAYS = (DRAFT, SECOND_DRAFT, TWO_DRAFTS, *[name for name in GUESSERS if name not in CONTROLS], AUTOMATIC)
"""Ways of guessing, in the order of the table."""
BY_TEXT = ("prompt_lookup", "ngram", "suffix", "retrieval")
COPYING = ("prompt_lookup", "suffix")
AUTOMATIC_GOAL, MIX_GOAL, COPY_GOAL = 0.98, 1.1, 1.5
CORPUS_CHARS = 1_000_000
"""Length of the corpus for `retrieval`, which consists of files that the pair was trained on."""
VOCABULARY = "simulated"
"""Name of the simulated tokenizer's vocabulary."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=8, help="of each workload")
    parser.add_argument("--tokens", type=int, default=128, help="of each text at most")
    parser.add_argument("--workload", metavar="NAME", help="those whose names contain this, without the mix of all")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it")


def measure(args: argparse.Namespace) -> list[Result]:
    """Record texts, decode each workload in every way, and then all workloads mixed."""
    asked = named(args.workload or "", workloads(args.texts), lambda each: each.title)
    with TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        index = _index_corpus(Path(folder))
        measured = list(pool.map(partial(_measured, args.tokens, index), asked))
        rows = [row for _, own in measured for row in own]
        if args.workload is None:
            rows += _Bench(args.tokens, index).mixed([each for each, _ in measured])
    rows.sort(key=lambda row: WAYS.index(row.way))
    if args.table is not None:
        args.table.write_text(table(rows))
    if args.svg is not None:
        draw(rows, args.svg)
    return [*map(_result, rows), *judged(rows)]


def ways(recorded: Recorded, index: str | None) -> Mapping[str, GuessingWay]:
    """Ways of guessing for a workload. Given texts have no target to ask, and only a grammar forces tokens."""
    names = _sources(recorded)
    found = _ways({name: (name,) for name in names} | {AUTOMATIC: names}, index)
    for way, drafts in ((SECOND_DRAFT, (1,)), (TWO_DRAFTS, (0, 1))):
        found[way] = replace(found[DRAFT], drafts=drafts)
    return found


def _ways(sources: Mapping[str, tuple[str, ...]], index: str | None) -> dict[str, GuessingWay]:
    own = SpeculationConfig(retrieval_index=index)
    return {name: GuessingWay(replace(own, guessers=named)) for name, named in sources.items()}


def _sources(recorded: Recorded) -> tuple[str, ...]:
    workload = recorded.workload
    forced = ("grammar",) if workload.grammar is not None else ()
    return (DRAFT, *BY_TEXT, *forced, *(() if workload.outputs else ("lookahead",)))


def jobs_of(recorded: Recorded) -> list[Job]:
    workload = recorded.workload
    return [
        Job(text, workload.temperature, agreements, workload.grammar)
        for text, agreements in zip(recorded.texts, recorded.agreements, strict=True)
    ]


def _index_corpus(folder: Path) -> Path:
    tokenizer, path = Tokenizer.from_directory(DEMO_DIRECTORY / "target"), folder / "corpus.index"
    corpus = "".join(document.text for document in load_split().training)[:CORPUS_CHARS]
    write_index(*encode_index([tokenizer.encode(corpus)], vocab_size=tokenizer.vocab_size, vocabulary=VOCABULARY), path)
    return path


def _measured(num_tokens: int, index: Path, workload: Workload) -> tuple[Recorded, list[Row]]:
    """Record and decode one workload; runs in a process of its own."""
    say(workload.title)
    torch.set_num_threads(1)
    bench = _Bench(num_tokens, index)
    recorded = bench.recorder.record(workload)
    return recorded.without_laws(), list(bench.rows(recorded))


class _Bench:
    """The recorder, and the corpus for retrieval."""

    def __init__(self, num_tokens: int, index: Path) -> None:
        self.recorder = Recorder(DEMO_DIRECTORY, num_tokens)
        self._index = str(index)
        self._corpus = CorpusIndex.open(index, VOCABULARY)

    def rows(self, recorded: Recorded) -> Iterator[Row]:
        """The row of each way of guessing; rows of single sources include what Theorem 3.8 predicts."""
        title, jobs = recorded.workload.title, jobs_of(recorded)
        plain = self._decode(jobs, PLAIN_WAY)
        decoded = {name: self._decode(jobs, way) for name, way in ways(recorded, self._index).items()}
        for name, found in decoded.items():
            row = _row(title, name, found, plain)
            yield self._with_theory(row, recorded, jobs) if name in (DRAFT, *GUESSERS) else row

    def mixed(self, recorded: Sequence[Recorded]) -> list[Row]:
        """Rows of one service that gets texts of all kinds, one after the other, as a server does."""
        say("decoding all of them mixed")
        in_turn = zip_longest(*map(jobs_of, recorded))
        jobs = [job for job in chain.from_iterable(in_turn) if job is not None]
        names = (DRAFT, *BY_TEXT)
        named = _ways({name: (name,) for name in names} | {AUTOMATIC: (*names, "grammar")}, self._index)
        plain = self._decode(jobs, PLAIN_WAY)
        return [_row(MIX, name, self._decode(jobs, way), plain) for name, way in named.items()]

    def _decode(self, jobs: Sequence[Job], way: GuessingWay, *, has_learned: bool = True) -> Decoded:
        return decode(jobs, way, self.recorder.vocab_size, self.recorder, len(jobs) // 2 if has_learned else 0)

    def _with_theory(self, row: Row, recorded: Recorded, jobs: Sequence[Job]) -> Row:
        in_turn = self._decode(jobs, _in_turn(row.way, self._index), has_learned=False)
        alpha = recorded.alpha
        if row.way != DRAFT:
            found = measure_guesser(partial(self._guesser, row.way, recorded), recorded.texts)
            row = replace(row, guess_us=found.guess_us, memory_kb=found.memory_kb)
            alpha = in_turn.first_accepted if row.way in ASKING else found.alpha  # depends on what was asked before
        promised, measured = expected_tokens(alpha, DEPTH), in_turn.report.tokens_per_round
        return replace(row, alpha=alpha, promised=promised, in_turn=measured)

    def _guesser(self, name: str, recorded: Recorded, text: Recording) -> Guesser:
        grammar = recorded.workload.grammar
        forced = {} if grammar is None else {"grammar": self.recorder.grammars.forced(grammar)}
        return GUESSERS[name](GuesserInputs(SpeculationConfig(), DEPTH, self._corpus, len(text.prompt), forced))


def _in_turn(name: str, index: str) -> GuessingWay:
    """The way that the theorem describes: chains, drafted and verified in turn."""
    chains = SpeculationConfig(policy="static", pipelining=False, guessers=(name,), retrieval_index=index)
    return GuessingWay(chains)


def _row(title: str, way: str, found: Decoded, plain: Decoded) -> Row:
    drafted, accepted = sum(found.drafted.values()), sum(found.accepted.values())
    return Row(
        title,
        way,
        acceptance=accepted / drafted if drafted else 0.0,
        tokens_a_pass=found.report.tokens_per_round,
        over_plain=found.rate / plain.rate,
        accepted=found.accepted,
    )


def _result(row: Row) -> Result:
    return Result(f"{row.workload}: {row.way}, over plain", round(row.over_plain, 3), "x", settings=row.settings)


def judged(rows: Sequence[Row]) -> Iterator[Result]:
    """Comparisons of each workload, with their goals."""
    for title in dict.fromkeys(row.workload for row in rows):
        factors = {row.way: row.over_plain for row in rows if row.workload == title}
        goal = MIX_GOAL if title == MIX else AUTOMATIC_GOAL
        yield at_least(goal, _over_best(title, factors, AUTOMATIC, (DRAFT, *GUESSERS)))
        if TWO_DRAFTS in factors:
            yield _over_best(title, factors, TWO_DRAFTS, (DRAFT, SECOND_DRAFT))
        if title.startswith("copy"):
            copying = max(COPYING, key=lambda way: factors[way])
            yield at_least(COPY_GOAL, _over_best(title, factors, copying, (DRAFT,)))


def _over_best(title: str, factors: Mapping[str, float], way: str, others: Sequence[str]) -> Result:
    best = max((name for name in others if name in factors), key=lambda name: factors[name])
    return Result(f"{title}: {way} over {best}", round(factors[way] / factors[best], 3), "x")
