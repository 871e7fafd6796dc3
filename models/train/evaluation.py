"""Figures of a pair on held-out files: losses by context length, acceptance, and sample completions."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from models.train.acceptance import measure_acceptance
from models.train.objectives import logits_of
from models.train.sampling import continue_prompts
from models.train.stream import windows_at

PROMPTS: Final = 64
PROMPT_TOKENS: Final = 128
CONTINUATION_TOKENS: Final = 96
TEMPERATURES: Final = (0.0, 0.7, 1.0)
LOSS_CONTEXTS: Final = (512, 2048)
LOSS_TOKENS: Final = 32768
SAMPLE_PROMPTS: Final = (
    "def read_json(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main():\n",
)
SAMPLE_TOKENS: Final = 64


@dataclass(frozen=True)
class HeldOutLoss:
    role: str
    context_tokens: int
    nats_per_token: float
    perplexity: float


def evaluate(pair: dict[str, Any], tokenizer: Any, held_out: Tensor, seed: int) -> dict[str, Any]:
    """All figures of the card as plain values. `pair` has the models of "target" and "draft"."""
    started = time.monotonic()
    losses = [held_out_loss(role, model, held_out, length) for role, model in pair.items() for length in LOSS_CONTEXTS]
    prompts = held_out_prompts(held_out, seed)
    acceptance = [
        asdict(each)
        for temperature in TEMPERATURES
        for each in measure_acceptance(pair["target"], pair["draft"], prompts, CONTINUATION_TOKENS, temperature, seed)
    ]
    return {
        "held_out_tokens": len(held_out),
        "losses": [asdict(loss) for loss in losses],
        "acceptance": acceptance,
        "samples": [sample(pair["target"], tokenizer, prompt) for prompt in SAMPLE_PROMPTS],
        "evaluation_s": round(time.monotonic() - started, 1),
    }


def held_out_prompts(held_out: Tensor, seed: int) -> Tensor:
    """Windows at random positions of the held-out files.  # [PROMPTS, PROMPT_TOKENS]"""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(held_out) - PROMPT_TOKENS, (PROMPTS,), generator=generator)
    return windows_at(held_out, starts, PROMPT_TOKENS)


def held_out_loss(role: str, model: Any, held_out: Tensor, length: int) -> HeldOutLoss:
    """Loss over the first `LOSS_TOKENS` held-out tokens, in windows of `length` tokens."""
    starts = torch.arange(0, min(LOSS_TOKENS, len(held_out) - length), length)
    total = 0.0
    for window in windows_at(held_out, starts, length):
        with torch.no_grad():
            logits = logits_of(model, window[None])[0, :-1].float()
        total += float(F.cross_entropy(logits, window[1:]))
    nats = total / len(starts)
    return HeldOutLoss(role, length, round(nats, 4), round(math.exp(nats), 2))


def sample(target: Any, tokenizer: Any, prompt: str) -> dict[str, str]:
    """The target's greedy completion of `prompt`, with the prompt."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    text = continue_prompts(target, ids, SAMPLE_TOKENS, 0.0, torch.Generator())[0, ids.shape[1] :]
    return {"prompt": prompt, "completion": tokenizer.decode(text)}
