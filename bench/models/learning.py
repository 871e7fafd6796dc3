"""A draft that learns from traffic: trained on prose, it follows callers who ask for code; a second one is boosted.

The service runs in this process (`outrider.LLM`), and so do the rounds of `outrider learn`, between its texts.
Acceptance is that of each place with a guess, on prompts that no round has seen.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.models.prompts import held_out_prompts
from bench.results import Result, at_most, say
from deploy.settings import DEMO_DIRECTORY
from models.train.corpus import load_split
from outrider import LLM, SamplingParams
from workers.live import (
    KeptText,
    Learner,
    LearningPlan,
    LearningRounds,
    RoundTerms,
    Versions,
    files_after,
    load_draft,
    read_kept,
    without_hits,
)

PROSE = Path(__file__).parents[2] / "docs"
PROMPT_CHARS = 300
SETTINGS = {
    "speculation.policy": "static",
    "speculation.max_draft_tokens": 4,
    "speculation.guessers": ["draft"],
}
NUM_TICKS = 3
"""The draft before is judged, the next is handed over, and what is in the buffer by then does not count for it."""
SHIFT_GOAL = 0.02
TOKENS_GOAL = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=TOKENS_GOAL, help="tokens of the target after the shift")
    parser.add_argument("--every-tokens", type=int, default=4000, help="tokens of a round")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prose-steps", type=int, default=60, help="steps of the training on prose alone, at 1e-3")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--texts", type=int, default=32, help="prompts that acceptance is measured on")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an output")
    parser.add_argument(
        "--boosted", action="store_true", help="also train a second draft, on what the first one misses"
    )


def measure(args: argparse.Namespace) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        link, asked = work / "current", _Asked(args, work)
        before = asked.acceptance(DEMO_DIRECTORY / "draft")
        link.symlink_to(asked.trained_on_prose())
        rounds = [asked.acceptance(link)]
        say(f"acceptance on code: {before:.3f} of the pair's draft, {rounds[0]:.3f} of one trained on prose")
        rounds += asked.learn(link)
        return [*_results(args, before, rounds), *(asked.boosted() if args.boosted else [])]


def _results(args: argparse.Namespace, before: float, rounds: Sequence[float]) -> list[Result]:
    settings = {"temperature": args.temperature, "by round": " ".join(f"{each:.3f}" for each in rounds)}
    missing = round(before - rounds[-1], 3)
    return [
        Result("acceptance on code, the pair's draft", round(before, 3), "share"),
        Result("acceptance on code, trained on prose", round(rounds[0], 3), "share"),
        Result(f"acceptance on code after {args.tokens} tokens", round(rounds[-1], 3), "share", settings=settings),
        at_most(SHIFT_GOAL, Result("short of the pair's draft", missing, "share")),
    ]


class _Asked:
    """The service, which is asked by turns for texts that are learnt from and for texts that are measured."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self._args, self._work = args, work
        self._buffer = work / "buffer"
        self._seeds = iter(range(1000, 10**9))
        self._plan = LearningPlan(num_steps=args.steps, batch=args.batch, learning_rate=args.learning_rate)

    def acceptance(self, draft: Path) -> float:
        """Acceptance rate of a draft on held-out code, with the same seeds each time. The draft never trains on it."""
        accepted = rejected = 0
        for text in self._measured(draft):
            accepted, rejected = accepted + text.num_accepted, rejected + text.num_rejected
        return accepted / max(1, accepted + rejected)

    def _measured(self, draft: Path) -> list[KeptText]:
        shutil.rmtree(self._work / "measured", ignore_errors=True)
        prompts = held_out_prompts(self._args.texts, seed=1)
        return self._texts(draft, prompts, self._work / "measured", range(len(prompts)))

    def trained_on_prose(self) -> Path:
        """The pair's draft after the same number of tokens of prose, whatever it forgets."""
        prompts = _prose(self._args.tokens // self._args.max_tokens + 1)
        texts = self._texts(DEMO_DIRECTORY / "draft", prompts, self._work / "prose", range(len(prompts)))
        learner = Learner(DEMO_DIRECTORY / "draft")
        learner.train(texts, LearningPlan(num_steps=self._args.prose_steps, batch=16, learning_rate=1e-3))
        learner.write(self._work / "trained on prose")
        return self._work / "trained on prose"

    def learn(self, link: Path) -> Iterator[float]:
        """Acceptance after each round of code."""
        args, num_tokens, documents = self._args, 0, _documents()
        self._buffer.mkdir()
        terms = RoundTerms(every_tokens=args.every_tokens, judge_guesses=args.every_tokens // 2, settle_s=0.0)
        rounds = LearningRounds(self._buffer, Versions(link, self._work / "versions"), self._plan, terms)
        chooser = random.Random(5)
        while num_tokens < args.tokens:
            num_prompts = args.every_tokens // args.max_tokens + 1
            prompts = [_piece(chooser.choice(documents), chooser) for _ in range(num_prompts)]
            texts = self._texts(link, prompts, self._buffer, [next(self._seeds) for _ in prompts])
            num_tokens += sum(text.num_chosen for text in texts)
            for said in filter(None, (rounds.tick(0.0) for _ in range(NUM_TICKS))):
                say(f"{num_tokens} tokens: {said}")
            yield self.acceptance(link)

    def boosted(self) -> list[Result]:
        """A second draft beside the learnt one: how often the first guess of either is the target's token."""
        first = load_draft(self._work / "current")
        places = [_all_places(text) for text in self._measured(self._work / "current")]
        left = without_hits(first, places)
        found = [Result("first guesses that are right, one draft", _share(left, places), "share")]
        kept = read_kept(files_after(self._buffer))
        for name, taught in (("trained alike", kept), ("boosted", without_hits(first, kept))):
            learner = Learner(DEMO_DIRECTORY / "draft")
            learner.train(taught, self._plan)
            learner.write(self._work / name)
            second = without_hits(load_draft(self._work / name), left)
            found.append(Result(f"the same, of two drafts, the second {name}", _share(second, places), "share"))
        return found

    def _texts(self, draft: Path, prompts: Sequence[str], buffer: Path, seeds: Sequence[int]) -> list[KeptText]:
        """Complete these prompts; returns what the target keeps of it."""
        seen = max((file.name for file in files_after(buffer)), default="") if buffer.is_dir() else ""
        args = self._args
        settings = {
            **SETTINGS,
            "target.engine.learning_buffer": str(buffer),
            "draft.engine.model": str(draft.resolve()),
        }
        common = {"temperature": args.temperature, "max_tokens": args.max_tokens, "ignore_eos": True}
        with LLM(settings=settings, progress=False) as llm:
            llm.generate(list(prompts), [SamplingParams(seed=seed, **common) for seed in seeds])
        return read_kept(files_after(buffer, seen))


def _all_places(text: KeptText) -> KeptText:
    """The text, as if all its places were missed."""
    missed = list(range(text.first, len(text.token_ids)))
    return replace(
        text, missed=missed, top_ids=[[text.token_ids[each]] for each in missed], top_logprobs=[[0.0]] * len(missed)
    )


def _share(left: Sequence[KeptText], places: Sequence[KeptText]) -> float:
    """Share of the places that are not left."""
    return round(1 - sum(len(text.missed) for text in left) / sum(len(text.missed) for text in places), 3)


def _prose(number: int) -> list[str]:
    """Pieces of pages of docs/."""
    pages = [text for page in sorted(PROSE.rglob("*.md")) if len(text := page.read_text()) > 2 * PROMPT_CHARS]
    chooser = random.Random(2)
    return [_piece(chooser.choice(pages), chooser) for _ in range(number)]


def _documents() -> list[str]:
    """Code that is not measured on."""
    return [each.text for each in load_split().training if len(each.text) > 2 * PROMPT_CHARS]


def _piece(text: str, chooser: random.Random) -> str:
    """A piece from the beginning of a line."""
    start = text.rfind("\n", 0, chooser.randrange(len(text) - PROMPT_CHARS)) + 1
    return text[start : start + PROMPT_CHARS]
