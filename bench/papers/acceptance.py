"""Acceptance by drafter, temperature and lenience, and Theorem 3.8 against measurement, as the papers have them.

Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023, tables 3 to 5.
Acceptance is measured as there: the mean over positions of texts that the target writes. No figure depends on the speed
of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.models.prompts import held_out_prompts
from bench.results import Result, say
from bench.rounds.draws import COMMON, complete
from core.records import Verification
from deploy.settings import DEMO_DIRECTORY
from models.train.acceptance import distributions, measure_acceptance
from models.train.corpus import load_split
from models.train.sampling import continue_prompts

LENIENCES = (1.0, 0.5, 0.3, 0.1)
GAMMAS = (1, 2, 4, 8)
RULES = {0.0: "greedy", 1.0: "rejection"}
"""Rules that Theorem 3.8 speaks of, by temperature."""
ORDERS = {"unigram": 1, "bigram": 2}
PROMPT_TOKENS = 64
UNSEEN = 1e-9
"""Chance of a token that an n-gram model has not seen, so that its logarithm is a number."""
Q_TOP_TOKENS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7], help="beside 0 and 1")
    parser.add_argument("--gammas", type=int, nargs="+", default=GAMMAS, help="draft lengths")


def measure(args: argparse.Namespace) -> list[Result]:
    torch.set_num_threads(1)
    target, draft = (demo_model(role) for role in ("target", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIRECTORY / "target")
    training, prompts = _training_tokens(tokenizer), prompt_tokens(tokenizer, args.prompts)
    drafters = {name: NgramModel(training, len(tokenizer), order) for name, order in ORDERS.items()} | {"draft": draft}
    by_drafter = list(_by_drafter(target, drafters, prompts, args))
    alphas = {result.name: result.value for result in by_drafter}
    return [*by_drafter, *_by_lenience(target, draft, prompts, args.tokens), *_theorem(alphas, args)]


class NgramModel:
    """A unigram or bigram model of the training texts, with the interface of a causal model. Nothing is smoothed."""

    def __init__(self, tokens: Tensor, vocab_size: int, order: int) -> None:
        self._order = order
        counts = torch.zeros(vocab_size ** (order - 1) * vocab_size, dtype=torch.int64)
        places = tokens if order == 1 else tokens[:-1] * vocab_size + tokens[1:]
        counts.scatter_add_(0, places, torch.ones_like(places))
        self._counts = counts.view(-1, vocab_size)

    def __call__(self, *, input_ids: Tensor, use_cache: bool) -> Any:  # noqa: ARG002  as causal models are called
        counts = self._counts[input_ids if self._order > 1 else torch.zeros_like(input_ids)].double()
        probs = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        return SimpleNamespace(logits=probs.clamp(min=UNSEEN).log())


def demo_model(role: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_DIRECTORY / role, dtype=torch.float32).eval()


def _training_tokens(tokenizer: Any) -> Tensor:
    """Tokens of the files that the pair was trained on."""
    texts = [document.text for document in load_split().training]
    return torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in ids])


def prompt_tokens(tokenizer: Any, num_prompts: int) -> Tensor:
    """The first tokens of held-out texts; of fewer texts if some are shorter.  # [up to num_prompts, PROMPT_TOKENS]"""
    ids = [tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in held_out_prompts(num_prompts)]
    return torch.tensor([each for each in ids if len(each) == PROMPT_TOKENS])


def _by_drafter(target: Any, drafters: dict[str, Any], prompts: Tensor, args: argparse.Namespace) -> Iterator[Result]:
    for name, drafter in drafters.items():
        for temperature in sorted({*RULES, *args.temperatures}):
            say(f"{name} at T = {temperature:g}")
            for each in measure_acceptance(target, drafter, prompts, args.tokens, temperature, seed=1):
                settings = {"standard_error": each.standard_error, "prompts": len(prompts)}
                yield Result(_name(name, temperature, each.rule), each.alpha, "share", settings=settings)


def _by_lenience(target: Any, draft: Any, prompts: Tensor, num_tokens: int) -> Iterator[Result]:
    """Appendix A.5: the mean of sum_x min(p(x) / l, q(x)) at T = 1."""
    texts = continue_prompts(target, prompts, num_tokens, 1.0, torch.Generator().manual_seed(1))
    both = list(distributions(target, draft, texts, num_tokens, 1.0))
    for lenience in LENIENCES:
        accepted = [torch.minimum(log_p.exp() / lenience, log_q.exp()).sum(-1) for log_p, log_q in both]
        yield Result(
            f"α of the draft, T = 1, lenience {lenience:g}", round(float(torch.cat(accepted).mean()), 4), "share"
        )


def _theorem(alphas: Mapping[str, float], args: argparse.Namespace) -> Iterator[Result]:
    """Tokens a round of chains of γ guesses in turn, beside (1 - α^(γ + 1)) / (1 - α)."""
    for temperature, rule in RULES.items():
        alpha = alphas[_name("draft", temperature, rule)]
        for gamma in args.gammas:
            say(f"chains of {gamma} at T = {temperature:g}")
            run = argparse.Namespace(temperature=temperature, prompts=args.prompts, tokens=args.tokens)
            speculation = replace(COMMON, policy="static", max_draft_tokens=gamma)
            stats = asyncio.run(complete(run, Verification.REJECTION, speculation, Q_TOP_TOKENS))
            tokens = 1.0 + sum(each.num_accepted_tokens for each in stats) / sum(
                each.num_draft_rounds for each in stats
            )
            promised = (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)
            name = f"tokens a round, chains of {gamma}, T = {temperature:g}"
            yield Result(name, round(tokens, 3), "tokens", settings={"promised": round(promised, 3)})


def _name(drafter: str, temperature: float, rule: str) -> str:
    return f"α of {drafter}, T = {temperature:g}, {rule}"
