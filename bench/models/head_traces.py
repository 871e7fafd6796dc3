"""`python -m bench.models.head_traces --out FILE` records how SmolLM2's head agrees with it, for simulations.

A head guesses from the target's features, and from its own outputs where it has guessed on. So agreement is recorded
for each number of guesses since the last features, all along the target's own text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.models.prompts import held_out_prompts
from bench.models.traces import NUM_TOKENS, Traces, agreement, write
from bench.peers.sides import QUESTIONS
from core.config import EngineConfig
from deploy.launch.first_pair import HEAD
from orchestrator.text import Tokenizer
from simulation.engines import HEAD_DEPTHS, HEAD_TEMPERATURES
from workers.model import reference_model
from workers.training import TrainingText
from workers.training.head.eagle3 import Eagle3
from workers.training.head.features import read_states
from workers.training.head.run import teacher_of
from workers.training.head.starting import shape_of
from workers.training.head.teaching import Steps
from workers.training.head.unrolling import unrolled
from workers.training.packing import pack

NUM_CODE = 12
"""Pieces of code that the target continues, beside as many questions that it answers."""


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.models.head_traces", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the traces go (.npz)")
    args = parser.parse_args()
    traces = record(args.target)
    np.savez_compressed(args.out, **traces)  # type: ignore[arg-type]  # numpy's stub mixes up its keywords
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    return 0


def record(directory: Path) -> Traces:
    """An array [prompts, tokens] per column, temperature and number of guesses since the last features; shares have one
    more axis."""
    target = reference_model(EngineConfig(str(directory))).requires_grad_(False)
    tensors = {name: each.float() for name, each in load_file(HEAD / "model.safetensors").items()}
    offsets = tensors.pop("d2t").long()
    del tensors["t2d"]
    vocabulary = torch.arange(len(offsets)) + offsets
    teacher = teacher_of(target, vocabulary.tolist())
    steps = partial(unrolled, Eagle3(shape_of(target), tensors), teacher)
    tokenizer = Tokenizer.from_directory(directory)
    traces: Traces = {}
    for temperature in HEAD_TEMPERATURES:
        rows = [
            _of_text(target, steps, vocabulary, torch.tensor(tokenizer.encode(prompt)), temperature, seed)
            for seed, prompt in enumerate(_prompts(tokenizer))
        ]
        traces |= {f"{name}@{temperature:g}": np.stack([row[name] for row in rows]) for name in rows[0]}
        right = [(traces[f"rank/{depth}@{temperature:g}"] == 0).mean() for depth in range(HEAD_DEPTHS)]
        print(f"T = {temperature:g}: right by depth {np.round(right, 3)}", flush=True)
    return traces


def _prompts(tokenizer: Tokenizer) -> list[str]:
    asked = [question for kind in QUESTIONS.values() for question in kind]
    chats = [tokenizer.chat_text([{"role": "user", "content": each}]) for each in asked]
    return [*chats, *held_out_prompts(NUM_CODE)]


@torch.inference_mode()
def _of_text(
    target: torch.nn.Module, steps: Steps, vocabulary: Tensor, prompt: Tensor, temperature: float, seed: int
) -> Traces:
    tokens = torch.cat([prompt, write(target, prompt, temperature, seed)])
    text = TrainingText(tokens.tolist(), [(len(prompt), len(tokens))])
    with tempfile.TemporaryDirectory() as folder:
        one = pack([text], [0], len(tokens), read_states(target, [text], Path(folder)))
    p_logits = target(tokens[None]).logits[0, len(prompt) - 1 : -1].float()
    found: Traces = {}
    for depth, (states, layer) in enumerate(steps(one, HEAD_DEPTHS)):
        first = len(prompt) - 2 - depth  # the row whose guess of this depth is the text's first token
        logits = torch.full_like(p_logits, float("-inf"))
        logits[:, vocabulary] = (states[first : first + NUM_TOKENS] @ layer.T).float()
        row = agreement(logits, p_logits, tokens[len(prompt) :], temperature, seed)
        found |= {f"{name}/{depth}": values for name, values in row.items()}
    return found


if __name__ == "__main__":
    sys.exit(main())
