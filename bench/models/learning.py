"""A draft that learns from traffic: callers of the demo pair turn from code to prose, and later drafts are boosted.

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
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--texts", type=int, default=48, help="prompts that acceptance is measured on")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an output")
    parser.add_argument("--boosted", action="store_true", help="also train two more drafts on what was missed")


def measure(args: argparse.Namespace) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        link = work / "current"
        link.symlink_to(DEMO_DIRECTORY / "draft")
        asked = _Asked(args, work)
        code = asked.acceptance(link, held_out_prompts(args.texts, seed=1))
        shifted = [asked.acceptance(link, _prose(args.texts, seed=1, is_held_out=True))]
        say(f"acceptance on code {code:.3f}, on prose {shifted[0]:.3f}")
        shifted += asked.learn(link)
        after = asked.acceptance(link, held_out_prompts(args.texts, seed=1))
        results = _results(args, code, shifted, after)
        return [*results, *(asked.boosted() if args.boosted else [])]


def _results(args: argparse.Namespace, code: float, shifted: Sequence[float], after: float) -> list[Result]:
    settings = {
        "tokens": args.tokens,
        "temperature": args.temperature,
        "rounds": " ".join(f"{each:.3f}" for each in shifted),
    }
    missing = code - shifted[-1]
    return [
        Result("acceptance before the shift, code", round(code, 3), "share"),
        Result("acceptance at the shift, prose", round(shifted[0], 3), "share"),
        Result("acceptance after learning, prose", round(shifted[-1], 3), "share", settings=settings),
        at_most(SHIFT_GOAL, Result("short of the acceptance before the shift", round(missing, 3), "share")),
        Result("acceptance after learning, code", round(after, 3), "share"),
    ]


class _Asked:
    """The service, which is asked by turns for texts that are learnt from and for texts that are measured."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self._args, self._work = args, work
        self._buffer = work / "buffer"
        self._seeds = iter(range(1000, 10**9))
        self._plan = LearningPlan(num_steps=args.steps, batch=args.batch, learning_rate=args.learning_rate)

    def acceptance(self, draft: Path, prompts: Sequence[str]) -> float:
        """Of a draft on these prompts, with the same seeds each time. Nothing of them is learnt from."""
        shutil.rmtree(self._work / "measured", ignore_errors=True)
        texts = self._texts(draft, prompts, self._work / "measured", range(len(prompts)))
        accepted, rejected = sum(text.num_accepted for text in texts), sum(text.num_rejected for text in texts)
        return accepted / max(1, accepted + rejected)

    def learn(self, link: Path) -> Iterator[float]:
        """Acceptance on held-out prose after each round."""
        args, num_tokens, seed = self._args, 0, 2
        self._buffer.mkdir()
        terms = RoundTerms(every_tokens=args.every_tokens, judge_guesses=args.every_tokens // 4, settle_s=0.0)
        rounds = LearningRounds(self._buffer, Versions(link, self._work / "versions"), self._plan, terms)
        while num_tokens < args.tokens:
            prompts = _prose(args.every_tokens // args.max_tokens + 1, seed, is_held_out=False)
            seed += 1
            texts = self._texts(link, prompts, self._buffer, [next(self._seeds) for _ in prompts])
            num_tokens += sum(text.num_chosen for text in texts)
            for said in filter(None, (rounds.tick(0.0) for _ in range(NUM_TICKS))):
                say(f"{num_tokens} tokens: {said}")
            yield self.acceptance(link, _prose(args.texts, seed=1, is_held_out=True))

    def boosted(self) -> list[Result]:
        """A second draft beside the learnt one: how often the first guess of either is the target's token."""
        prompts, first = _prose(self._args.texts, seed=1, is_held_out=True), load_draft(self._work / "current")
        texts = self._texts(self._work / "current", prompts, self._work / "places", range(len(prompts)))
        places = [_all_places(text) for text in texts]
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


def _prose(number: int, seed: int, *, is_held_out: bool) -> list[str]:
    """Pieces of pages of docs/, each from the beginning of a line; one page in four is held out."""
    pages = [page.read_text() for page in sorted(PROSE.rglob("*.md"))]
    chosen = [page for index, page in enumerate(pages) if (index % 4 == 0) == is_held_out and len(page) > 1000]
    chooser = random.Random(seed)
    return [_piece(chooser.choice(chosen), chooser) for _ in range(number)]


def _piece(page: str, chooser: random.Random) -> str:
    start = page.rfind("\n", 0, chooser.randrange(len(page) - PROMPT_CHARS)) + 1
    return page[start : start + PROMPT_CHARS]
