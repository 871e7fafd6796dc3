"""Every guesser: its cost to the event loop, its hits on real texts, and its gain beside a draft by kind of text.

The third part (`--only table`) has the table of docs/guessers.md. The other parts run no model: a fixed text stands for
the target's output. A guess is right if the text continues with it. A round commits the accepted path of the `--nodes`
likeliest nodes, and one more token. The controls show how many guesses are right by chance. Times are the thread's own
processor time, medians over rounds.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from bench.control import workloads
from bench.control.loops import Exchange, loops
from bench.results import Result, at_most, spread
from core.config import SpeculationConfig
from core.speculation import ROOT, Guesser, QuestioningGuesser, SourcePrecision, SpeculationTree
from orchestrator.guessers import (
    ASKING,
    BY_TEXT,
    CONTROLS,
    GUESSERS,
    Breaker,
    CorpusIndex,
    GuesserInputs,
    Guessers,
    Histories,
    History,
    OutputForm,
    Panel,
    encode_index,
)
from orchestrator.text import Tokenizer

ROOT_DIR: Final = Path(__file__).resolve().parents[2]
CONTEXT_TOKENS: Final = 8192
ROUND_TOKENS: Final = 4
NUM_ROUNDS: Final = 400
DEPTH: Final = 8
MAX_COST_US: Final = 50.0
PROMPT_SHARE: Final = 0.5
TEXTS: Final = Path(__file__).parent / "texts"
"""Fixed copies of files of this project, so that figures do not change when the files do."""
CODE: Final = ("draft_side.py.txt", "speculation_tree.py.txt", "request.py.txt")
PROSE: Final = ("control.md.txt", "exactness.md.txt")
HISTORY_TOKENS: Final = SpeculationConfig().suffix_history_tokens
OUTPUT_TOKENS: Final = 250
"""Length of each remembered output, in tokens."""
EDITED: Final = "tree_policy.py.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings."""
    parser.add_argument("--only", choices=("cost", "worth", "table"), help="one part; all without it")
    parser.add_argument("--nodes", type=int, default=16, metavar="N", help="of a block (default: 16)")
    workloads.add_arguments(parser)


def measure(args: argparse.Namespace) -> list[Result]:
    """Run the chosen parts, costs first."""
    tokenizer = Tokenizer.from_directory(ROOT_DIR / "models" / "demo" / "target")
    parts: Mapping[str, Callable[[], Iterable[Result]]] = {
        "cost": lambda: costs(tokenizer),
        "worth": lambda: worths(tokenizer, args.nodes),
        "table": lambda: workloads.measure(args),
    }
    return [result for part in parts if args.only in (None, part) for result in parts[part]()]


def guessers(tokenizer: Tokenizer) -> Mapping[str, tuple[str, GuesserInputs]]:
    """All guessers that work on any text, and one variant with branches. Retrieval uses the corpus."""
    index = CorpusIndex(*encode_index([_texts(tokenizer)["corpus"]], vocab_size=tokenizer.vocab_size, vocabulary=""))
    inputs = GuesserInputs(SpeculationConfig(), DEPTH, index, vocab_size=tokenizer.vocab_size)
    branching = replace(inputs, config=SpeculationConfig(lookup_branches=4))
    return {name: (name, inputs) for name in BY_TEXT} | {"prompt_lookup, 4 branches": ("prompt_lookup", branching)}


# Cost


def costs(tokenizer: Tokenizer) -> Iterator[Result]:
    """Costs of a round at 8k tokens: the guesser alone, everything done with its answer, and the first round."""
    text = _texts(tokenizer)["code"]
    text = (text * (1 + (CONTEXT_TOKENS + NUM_ROUNDS * ROUND_TOKENS) // len(text)))[: CONTEXT_TOKENS * 2]
    asked = dict(guessers(tokenizer))
    remembering = replace(asked["suffix"][1], history=_filled(_texts(tokenizer)["corpus"]))
    asked["suffix, full of recent outputs"] = "suffix", remembering
    for name, (source, inputs) in asked.items():
        guesser, log = GUESSERS[source](inputs), text[:CONTEXT_TOKENS]
        work = (
            partial(_talk, guesser, log, text)
            if isinstance(guesser, QuestioningGuesser)
            else partial(guesser.propose, log)
        )
        first_us = _elapsed_us(work)
        alone = list(_rounds(text, log, work))
        panel = Panel(
            {source: GUESSERS[source](inputs)}, {source: Breaker(source)}, SourcePrecision(), tokenizer.vocab_size
        )
        log = text[:CONTEXT_TOKENS]
        panel.ask(log)
        whole = list(_rounds(text, log, partial(_ask, panel, log)))
        yield at_most(MAX_COST_US, spread(f"{name}: guessing", alone, "us"))
        yield spread(f"{name}: with checks, calibration, the tree and learning", whole, "us")
        yield Result(f"{name}: the first time, in a text of 8k", round(first_us, 1), "us")


def _filled(corpus: Sequence[int]) -> History:
    """An indexed history that has been filled twice over."""
    history = History(HISTORY_TOKENS)
    for first in range(0, 2 * HISTORY_TOKENS, OUTPUT_TOKENS):
        history.add(corpus[first : first + OUTPUT_TOKENS], 0)
        history.continuations((), 0, 0)
    return history


def _rounds(text: Sequence[int], log: list[int], work: Callable[[], object]) -> Iterator[float]:
    """Microseconds of each round. The log grows by a few tokens per round."""
    for _ in range(NUM_ROUNDS):
        log += text[len(log) : len(log) + ROUND_TOKENS]
        yield _elapsed_us(work)


def _ask(panel: Panel, log: Sequence[int]) -> None:
    panel.observe(log[-ROUND_TOKENS:])
    tree = SpeculationTree()
    for source, guesses in panel.ask(log):
        tree.add_guesses(guesses, source)


def _talk(guesser: QuestioningGuesser, log: Sequence[int], text: Sequence[int]) -> None:
    """One round with questions. The answers come from elsewhere in the text, so that n-grams are added and dropped."""
    guesser.propose(log)
    guesser.answered(text[len(log) // 2 :][: 1 + len(guesser.questions(log))])


def _elapsed_us(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return 1e6 * (time.thread_time() - began_s)


# Worth


def worths(tokenizer: Tokenizer, num_nodes: int) -> Iterator[Result]:
    """Tokens per round of each guesser alone, and of all of them together, on each text."""
    texts = _texts(tokenizer)
    asked_for = {name: made for name, made in guessers(tokenizer).items() if name not in ASKING}
    num_ids = tokenizer.vocab_size
    for kind in ("code", "prose", "edits", "log"):
        alone = {name: {source: GUESSERS[source](inputs)} for name, (source, inputs) in asked_for.items()}
        others = [(source, inputs) for source, inputs in asked_for.values() if source not in CONTROLS]
        together = {source: GUESSERS[source](inputs) for source, inputs in others}
        for name, asked in (*alone.items(), ("all together", together)):
            yield Result(f"{kind}: {name}", _tokens_a_round(texts[kind], asked, num_nodes, num_ids), "tokens")
    yield from worths_of_history(tokenizer, num_nodes)


def _tokens_a_round(text: Sequence[int], guessers: Mapping[str, Guesser], num_nodes: int, vocab_size: int) -> float:
    breakers = {name: Breaker(name) for name in guessers}
    begin = int(len(text) * PROMPT_SHARE)
    num_rounds = _num_rounds(Panel(guessers, breakers, SourcePrecision(), vocab_size), text, begin, num_nodes)
    return round((len(text) - begin) / num_rounds, 3)


def _num_rounds(panel: Panel, text: Sequence[int], begin: int, num_nodes: int) -> int:
    """Number of rounds until the whole text is committed; the text before `begin` is the prompt."""
    log, num_rounds = list(text[:begin]), 0
    while len(log) < len(text):
        tree = SpeculationTree()
        for source, guesses in panel.ask(log):
            tree.add_guesses(guesses, source)
        block = tree.block(tree.best(num_nodes, DEPTH))
        place, num_accepted = ROOT, 0
        while len(log) + num_accepted < len(text) - 1:
            node = block.child(place, text[len(log) + num_accepted])
            if node is None:
                break
            place, num_accepted = node, num_accepted + 1
        committed = text[len(log) : len(log) + num_accepted + 1]
        panel.observe(committed)
        log += committed
        num_rounds += 1
    return num_rounds


def worths_of_history(tokenizer: Tokenizer, num_nodes: int) -> Iterator[Result]:
    """Tokens per round of a caller's later requests, with and without its earlier outputs."""
    prose = (TEXTS / PROSE[0]).read_text(encoding="utf-8")
    edited = (TEXTS / EDITED).read_text(encoding="utf-8")
    for kind, exchanges in loops(tokenizer, edited, prose).items():
        for name, max_tokens in (("suffix", 0), ("suffix with recent outputs", HISTORY_TOKENS)):
            found = _tokens_a_round_later(exchanges, max_tokens, num_nodes, tokenizer.vocab_size)
            yield Result(f"{kind}: {name}", found, "tokens")


def _tokens_a_round_later(exchanges: Sequence[Exchange], max_tokens: int, num_nodes: int, vocab_size: int) -> float:
    """Average over all requests except the first."""
    config = SpeculationConfig()
    asked, worth, num_tokens, num_rounds = Guessers(histories=Histories(max_tokens)), SourcePrecision(), 0, 0
    for number, (prompt, output) in enumerate(exchanges):
        text = [*prompt, *output]
        form = OutputForm(len(prompt), isolation="caller")
        panel = asked.panel(["suffix"], config, DEPTH, worth, vocab_size, form)
        num = _num_rounds(panel, text, len(prompt), num_nodes)
        panel.ended(text)
        num_tokens += len(output) * (number > 0)
        num_rounds += num * (number > 0)
    return round(num_tokens / num_rounds, 3)


# Texts


def _texts(tokenizer: Tokenizer) -> Mapping[str, list[int]]:
    """Texts of this project. "edits" is a file, followed by the same file with names changed; "log" has rows of one
    form."""
    code = "".join((TEXTS / name).read_text(encoding="utf-8") for name in CODE)
    prose = "".join((TEXTS / name).read_text(encoding="utf-8") for name in PROSE)
    old = (TEXTS / EDITED).read_text(encoding="utf-8")
    edited = old + re.sub(r"\b(policy|known|costs)\b", r"\1s", old)
    dice = Random(1)
    rows = "".join(
        f"2026-11-24 12:{index // 60:02}:{index % 60:02} INFO served request={dice.randrange(10**6)} "
        f"status={dice.choice((200, 200, 200, 429))} tokens={dice.randrange(300)}\n"
        for index in range(150)
    )
    corpus = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT_DIR / "workers").glob("**/*.py")))
    texts = {"code": code, "prose": prose, "edits": edited, "log": rows, "corpus": corpus}
    return {kind: list(tokenizer.encode(text)) for kind, text in texts.items()}
