"""`python -m bench.models.traces --out FILE` records the demo pair's agreement by token, for the simulator to replay.

The target continues held-out prompts, and the draft's predictions along that text are recorded
(`simulation.engines.texts.Agreement` lists the values). From each position a chain is drawn from the draft, too, and
verified by block verification, whose acceptance does not follow from single tokens. Sampling, noise and verification
are the reference implementation (core.exact.sampling, core.rules), so a trace is a measurement, not a model. Rejection
and block verification get the whole q, so the traces do not include the loss of acceptance by truncating q
(`SpeculationConfig.q_top_tokens`).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from core import noise
from core.noise import Purpose
from core.rules import chains as acceptance
from models.train.corpus import load_split
from models.train.evaluation import PROMPT_TOKENS, held_out_prompts
from models.train.stream import token_stream
from simulation.engines import (
    COLUMNS,
    MAX_GAMMA,
    MAX_RANK,
    RECORDED_TEMPERATURES,
    SHARE_RANKS,
    SHARE_STEP,
    Column,
)

NUM_PROMPTS: Final = 40
NUM_TOKENS: Final = 160
PROMPT_SEED: Final = 1

Float64 = NDArray[np.float64]
Traces = dict[str, NDArray[np.uint8]]


@dataclass(frozen=True)
class ModelPair:
    """Both models in float32."""

    target: Any
    draft: Any

    @classmethod
    def load(cls, directory: Path) -> ModelPair:
        """Load the models below `directory`, arranged as in `models/demo`."""
        models = [AutoModelForCausalLM.from_pretrained(directory / name).float().eval() for name in ("target", "draft")]
        return cls(*models)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.models.traces", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("models/demo"), metavar="DIR", help="target and draft")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the traces go (.npz)")
    args = parser.parse_args()
    started_s = time.monotonic()
    traces = record(ModelPair.load(args.models), prompts(args.models / "target"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, **traces)  # type: ignore[arg-type]  # numpy's stub mixes up its keywords
    print(f"{args.out}: {args.out.stat().st_size:,} bytes in {time.monotonic() - started_s:.0f} s")
    return 0


def prompts(directory: Path) -> torch.Tensor:
    """The first windows used by `models.train.evaluation`.  # [NUM_PROMPTS, PROMPT_TOKENS]"""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    stream = token_stream(tokenizer, (document.text for document in load_split().held_out))
    return held_out_prompts(stream, PROMPT_SEED)[:NUM_PROMPTS]


def record(pair: ModelPair, windows: torch.Tensor) -> Traces:
    """An array [prompts, tokens] per column and temperature; shares and block acceptance have one more axis."""
    traces: Traces = {}
    for temperature in RECORDED_TEMPERATURES:
        rows = [_record_one(pair, window, temperature, seed) for seed, window in enumerate(windows)]
        for column in rows[0]:
            traces[f"{column}@{temperature:g}"] = np.stack([row[column] for row in rows])
        print(_summary(temperature, traces), flush=True)
    return traces


@torch.no_grad()
def _record_one(pair: ModelPair, window: torch.Tensor, temperature: float, seed: int) -> dict[str, NDArray[np.uint8]]:
    """Record one text."""
    tokens = torch.cat([window, write(pair.target, window, temperature, seed)])
    logits = pair.draft(tokens[None]).logits[0, PROMPT_TOKENS - 1 : -1]  # [NUM_TOKENS, V]
    p_logits = pair.target(tokens[None]).logits[0, PROMPT_TOKENS - 1 : -1]
    row = agreement(logits, p_logits, tokens[PROMPT_TOKENS:], temperature, seed)
    return row if temperature == 0 else row | {"blocks": _judged_chains(pair, tokens, temperature, seed)}


def agreement(
    logits: torch.Tensor, p_logits: torch.Tensor, tokens: torch.Tensor, temperature: float, seed: int
) -> dict[str, NDArray[np.uint8]]:
    """The stored values of a text. `logits`: the draft's; `p_logits`: the target's  # [NUM_TOKENS, V] each"""
    text, log_q = tokens.numpy(), _log_law(logits, temperature)
    scores = log_q + _gumbel(seed, temperature, log_q.shape[1])
    row = {
        Column.RANK: _rank(scores, text),
        Column.PLAIN_RANK: _rank(log_q, text),
        Column.CONFIDENCE: _first_share(scores if temperature else _log_law(logits, 1.0)),
    }
    row |= _confidence(_log_law(logits, temperature or 1.0))
    if temperature == 0:
        row[Column.ALPHA] = (row[Column.RANK] == 0).astype(np.float64)
    else:
        row[Column.ALPHA] = np.minimum(np.exp(_log_law(p_logits, temperature)), np.exp(log_q)).sum(axis=1)
    return _packed(row) | _shares(scores if temperature else _log_law(logits, 1.0))


@torch.no_grad()
def write(target: Any, window: torch.Tensor, temperature: float, seed: int) -> torch.Tensor:
    """The target's own text after `window`, with the noise of coupled mode. Positions count from the prompt's end."""
    cache, tokens = DynamicCache(), [window]
    for position in range(NUM_TOKENS):
        logits = target(tokens[-1][None], past_key_values=cache, use_cache=True).logits[:, -1]
        log_p = _log_law(logits, temperature)[0]
        if temperature:
            log_p = log_p + noise.gumbel(seed, position, 0, Purpose.SHARED, len(log_p))
        tokens.append(torch.tensor([int(log_p.argmax())]))
    return torch.cat(tokens[1:])


def _log_law(logits: torch.Tensor, temperature: float) -> Float64:
    """Log probabilities at this temperature; at 0 those at temperature 1, which have the same order.  # [N, V]"""
    log_law: Float64 = (logits.double() / (temperature or 1.0)).log_softmax(-1).numpy()
    return log_law


def _gumbel(seed: int, temperature: float, vocab_size: int) -> Float64:
    """The shared noise of all positions, or zeros in greedy decoding.  # [NUM_TOKENS, V] or [NUM_TOKENS, 1]"""
    if temperature == 0:
        return np.zeros((NUM_TOKENS, 1))
    keys = [noise.key(seed, position, 0, Purpose.SHARED) for position in range(NUM_TOKENS)]
    return noise.gumbel_rows(keys, vocab_size).astype(np.float64)


def _rank(scores: Float64, tokens: NDArray[np.int64]) -> Float64:
    """Number of tokens with a higher score than the given one, row by row."""
    own = np.take_along_axis(scores, tokens[:, None], axis=1)
    rank: Float64 = (scores > own).sum(axis=1).astype(np.float64)
    return rank


def _confidence(log_q: Float64) -> dict[Column, Float64]:
    q = np.exp(log_q)
    entropy = -np.multiply(q, log_q, where=q > 0, out=np.zeros_like(q)).sum(axis=1)
    return {Column.PLAIN_CONFIDENCE: q.max(axis=1), Column.ENTROPY: entropy}


def _first_share(scores: Float64) -> Float64:
    """The largest share of each row's softmax."""
    share: Float64 = 1.0 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)
    return share


def _shares(scores: Float64) -> dict[str, NDArray[np.uint8]]:
    """Shares of candidates relative to the first, in steps of the logarithm.  # [NUM_TOKENS, SHARE_RANKS]"""
    kept = -np.sort(-scores, axis=1)[:, list(SHARE_RANKS)]
    steps = (kept[:, :1] - kept) / SHARE_STEP
    return {"shares": np.clip(np.rint(steps), 0, 255).astype(np.uint8)}


# Block verification of chains


def _judged_chains(pair: ModelPair, tokens: torch.Tensor, temperature: float, seed: int) -> NDArray[np.uint8]:
    """Accepted guesses of block verification for the first 1, 2, ... guesses of each chain.  # [NUM_TOKENS, gamma]"""
    random = np.random.default_rng([seed, 2])
    chains, q = _draw_chains(pair.draft, tokens, temperature, random)
    logits = _after_chains(pair.target, tokens, chains)
    p = np.exp(_log_law(logits, temperature))  # [NUM_TOKENS, gamma + 1, V]
    uniforms = random.random((NUM_TOKENS, MAX_GAMMA))
    return np.array([_num_accepted(*each) for each in zip(chains, p, q, uniforms, strict=True)], dtype=np.uint8)


def _num_accepted(chain: NDArray[np.int64], p: Float64, q: Float64, uniforms: Float64) -> list[int]:
    steps = range(MAX_GAMMA)
    p_guess, q_guess = [float(p[i, chain[i]]) for i in steps], [float(q[i, chain[i]]) for i in steps]
    weights = acceptance.prefix_weights(p_guess, q_guess)
    masses = [float(np.maximum(weights[i] * p[i] - q[i], 0.0).sum()) for i in steps]
    return [
        acceptance.count_by_block(weights[: gamma + 1], masses[:gamma], uniforms[:gamma].tolist())
        for gamma in range(1, MAX_GAMMA + 1)
    ]


def _draw_chains(
    draft: Any, tokens: torch.Tensor, temperature: float, random: np.random.Generator
) -> tuple[NDArray[np.int64], Float64]:
    """A chain of guesses after each prefix of the text [NUM_TOKENS, gamma], and its q [NUM_TOKENS, gamma, V]."""
    chains, laws = np.zeros((NUM_TOKENS, 0), dtype=np.int64), []
    for _ in range(MAX_GAMMA):
        logits = _after_chains(draft, tokens, chains)[:, -1]
        law = np.exp(_log_law(logits, temperature))
        drawn = (law.cumsum(axis=1) > random.random((NUM_TOKENS, 1))).argmax(axis=1)
        laws.append(law)
        chains = np.concatenate([chains, drawn[:, None]], axis=1)
    return chains, np.stack(laws, axis=1)


def _after_chains(model: Any, tokens: torch.Tensor, chains: NDArray[np.int64]) -> torch.Tensor:
    """Logits after each prefix of the text and after each guess of its chain.  # [NUM_TOKENS, depth + 1, V]

    The text and all chains form one sequence, a token tree: each guess sees its prefix and the guesses before it.
    """
    depth, num_text = chains.shape[1], len(tokens) - 1
    ids = torch.cat([tokens[:-1], torch.from_numpy(chains.T.reshape(-1).copy())])
    positions = torch.arange(num_text)
    starts = torch.arange(PROMPT_TOKENS, PROMPT_TOKENS + NUM_TOKENS)  # the position of each chain's first guess
    positions = torch.cat([positions, *(starts + step for step in range(depth))])
    sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    sees[:num_text, :num_text] = torch.ones(num_text, num_text, dtype=torch.bool).tril()
    for step in range(depth):
        rows = num_text + step * NUM_TOKENS + torch.arange(NUM_TOKENS)
        sees[rows, :num_text] = torch.arange(num_text)[None] < starts[:, None]
        for above in range(step + 1):
            sees[rows, num_text + above * NUM_TOKENS + torch.arange(NUM_TOKENS)] = True
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
    logits = model(ids[None], attention_mask=mask, position_ids=positions[None]).logits[0]
    after_text = logits[PROMPT_TOKENS - 1 : num_text][:, None]
    after_guesses = logits[num_text:].view(depth, NUM_TOKENS, logits.shape[-1]).transpose(0, 1)
    return torch.cat([after_text, after_guesses], dim=1)


# Storage


def _packed(row: dict[Column, Float64]) -> dict[str, NDArray[np.uint8]]:
    packed: dict[str, NDArray[np.uint8]] = {}
    for column, scale in COLUMNS.items():
        most = MAX_RANK if scale == 1 else 255
        packed[column.value] = np.clip(np.rint(row[column] * scale), 0, most).astype(np.uint8)
    return packed


def _summary(temperature: float, traces: Traces) -> str:
    rank, alpha = traces[f"rank@{temperature:g}"], traces[f"alpha@{temperature:g}"] / 255
    return f"T = {temperature:g}: coupled {(rank == 0).mean():.3f}, rejection {alpha.mean():.3f}"


if __name__ == "__main__":
    sys.exit(main())
