"""Drafts of two models merged into one tree, against each alone with as many guesses.

The second draft is four of the target's six layers, which agree with the target about as well as the draft does. The
orchestrator is real; engines replay the models' recorded agreement on code. No figure depends on the speed of the
machine. Source: Miao et al. 2024 (SpecInfer, arXiv 2305.09781).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

from bench.control.recorder import Recorded, Recorder
from bench.control.replay import GuessingWay, decode
from bench.control.workload_texts import workloads
from bench.control.workloads import jobs_of
from bench.results import Result, say
from core.config import SpeculationConfig
from core.speculation import DRAFT
from deploy.settings import DEMO_DIRECTORY

KIND = "code completion"
DRAFTS = {"the draft": (0,), "the second": (1,), "both merged": (0, 1)}
NODES = (4, 8, 16, 32)
CANDIDATES = (1, 2, 4)
DEPTH = 8


def measure(args: argparse.Namespace) -> list[Result]:
    torch.set_num_threads(1)
    recorder = Recorder(DEMO_DIRECTORY, args.tokens)
    asked = [each for each in workloads(max(2, args.prompts // 4)) if each.name == KIND]
    results: list[Result] = []
    for workload in asked:
        say(f"merged drafts, {workload.title}")
        recorded = recorder.record(workload)
        results += [*_of_one_token(recorded), *_of_trees(recorded, recorder.vocab_size)]
    return results


def _of_one_token(recorded: Recorded) -> Iterator[Result]:
    """Chance that the target's token is among the candidates: the first k of one draft, or k / 2 of each."""
    ranks = [
        tuple(place.rank for place in both) for of_text in recorded.agreements for both in zip(*of_text, strict=True)
    ]
    for count in CANDIDATES:
        for name, drafts in DRAFTS.items():
            if count % len(drafts):
                continue
            most = count // len(drafts)
            share = _share([min(rank[draft] for draft in drafts) < most for rank in ranks])
            yield Result(f"{recorded.workload.title}: {count} candidates of {name}", share, "share")


def _of_trees(recorded: Recorded, vocab_size: int) -> Iterator[Result]:
    jobs = jobs_of(recorded)
    for nodes in NODES:
        tree = SpeculationConfig(
            policy="static_tree", max_draft_tokens=min(nodes, DEPTH), max_block_tokens=nodes, guessers=(DRAFT,)
        )
        for name, drafts in DRAFTS.items():
            found = decode(jobs, GuessingWay(tree, drafts), vocab_size)
            settings = {"accepted": dict(found.accepted), "guesses": dict(found.drafted)}
            title = f"{recorded.workload.title}: trees of {nodes} of {name}, tokens a round"
            yield Result(title, round(found.report.tokens_per_round, 3), "tokens", settings=settings)


def _share(hits: Sequence[bool]) -> float:
    return round(sum(hits) / len(hits), 4)
