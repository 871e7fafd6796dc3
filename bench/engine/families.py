"""Tests the runtime on architectures of transformers, with tiny random weights, against transformers' eager code.

A sequence is computed as two chunks and a tree of guesses, with all weights packed if the CPU has kernels for it. The
logits are compared with one eager forward pass over each path. No code depends on an architecture's name, except for
sizes that some need.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import math
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from bench.checkpoints.published import read
from bench.checkpoints.section import with_section
from bench.checkpoints.tried import results_of, try_checkpoint
from bench.engine.two_ranks import on_two_ranks
from bench.results import Result, at_most, say
from core.config import EngineConfig
from core.errors import StartupError
from core.speculation import ROOT, TokenTree
from workers.model import loader
from workers.runtime import ModelRuntime
from workers.step import StepRows

VOCAB_SIZE = 96
MAX_PARAMETERS = 30_000_000
"""A larger model has ignored `SIZES`, and counts as a failure."""
TOLERANCE = 1e-4
"""Largest difference of a logit relative to the largest logit: float32 with another order of summation."""
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # wide, so that attention matters
    "sliding_window": 12,  # shorter than the sequence
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Sizes of the tiny models. Names that an architecture does not know have no effect."""
BASIC = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Sizes that every architecture has, used together with the ids of special tokens."""
LATENT = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "minicpm3",
    "youtu",
)
"""Architectures with latent attention, which has one key per query head."""
DELTA = ("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Architectures with gated delta nets."""
_DELTA: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MAMBA2: Mapping[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_CONV: Mapping[str, Any] = {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(DELTA, _DELTA),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONV),
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "mistral": {"sliding_window": 12},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 12, "query_pre_attn_scalar": 16},
    "cohere2": {"sliding_window": 12},
    "olmo3": {"sliding_window": 12},
    "gpt_oss": {"sliding_window": 12},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"mlp_only_layers": [0]},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 12},
    **{family: {"num_key_value_heads": 4} for family in LATENT},
}
"""Windows shorter than the sequence, recurrent layers beside attention, and sizes that depend on others."""
SERVED, REFUSED, DIFFERENT, NOT_BUILT = "served", "refused", "DIFFERENT", "not tried"
HEADER = """# Families

What `python -m bench families --write docs/families.md` found with transformers {version}: every architecture that it
maps to a causal language model, built with tiny random weights, loaded by `workers/model/loader.py` as a checkpoint of
a user's is, and compared with its own eager code: a prompt in two chunks, then a tree of guesses, float32, in
deterministic steps (so that all linear layers are packed where the CPU has kernels for them, and experts are in
tiles). *served*: all logits agree to {tolerance:g} of the largest. *refused*: at start, with this reason, before any
request. *not tried*: it cannot be built from the few sizes that the program knows; it may or may not be servable, and
`outrider check` says which for a real checkpoint. What a tiny configuration leaves out was not tried:
`minimax_m3_vl_text` has no sparse layers (real ones are refused for theirs). Where an architecture decides by a
pattern over many layers which of them slide a window, two layers may all be of one kind.

*On two ranks*: two ranks of a plain engine gave the same logits, by slices of each weight; *by whole experts*: with
`expert_parallel`, too ([parallel.md](parallel.md)). *No*: refused at start, with this reason.

Recurrent layers (gated delta nets, Mamba, Mamba-2, short convolutions) are served as target and as draft, where their
code keeps its state in transformers' cache ([adr/models.md](adr/models.md)): {recurrent}.
Such a model has one rank and no compiled backend. A prompt shares prefixes with others only up to where a state was
kept: the last whole block of a part of a prompt, and the whole blocks of an output. `deterministic` computes recurrent
layers token by token, prompts too.

Encoder-decoders are served as target and as draft: bart, marian, mbart, mt5, pegasus, plbart, t5. A request's prompt,
or its `source`, is what the encoder reads. All of them are checked token by token against `generate`, several sources
in a batch (tests/workers/runtime/test_runtime_sources.py), and BART and T5 v1.1 (as mt5) through sessions: greedy and
seeded, chains and trees, crashes, little memory (tests/system/test_sources.py). A draft may have another architecture
of the same vocabulary, with an encoder or without: a decoder reads the source as the beginning of its text. Such a
model has one rank and no compiled backend; `layers`, `quantize`, adapters and heads are refused by name. A model
without a limit of its own (T5) reads sources of at most 2,048 tokens, unless `max_context_tokens` says more.

Nine families are checked token by token against `generate` by the tests, over gRPC, too
(tests/workers/runtime/test_runtime_families.py, tests/system/test_served_families.py): {tested}.
The recurrent ones are checked in the same way without gRPC. Mixtures of experts on two ranks are, too: greedy and
seeded, with guesses and without (tests/workers/parallel/test_parallel_experts.py).
"""
RECURRENT = (
    *DELTA,
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "lfm3"),
    *("mamba", "mamba2", "nemotron_h"),
)
TESTED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_neox", "phi3", "gpt2")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one architecture."""

    family: str
    outcome: str
    detail: str
    ranks: str = ""
    """How two ranks can share it, or why not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="MODEL_TYPE", help="architectures, and no checkpoints")
    parser.add_argument("--checkpoints", nargs="*", metavar="NAME", help="checkpoints, and no architectures")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a table of all findings")


def measure(args: argparse.Namespace) -> list[Result]:
    """Try all chosen checkpoints and architectures."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    before = args.write.read_text() if args.write is not None and args.write.is_file() else ""
    rows = [] if args.only is not None else [try_checkpoint(published) for published in read(args.checkpoints)]
    if args.checkpoints is not None:
        if args.write is not None:
            args.write.write_text(with_section(before, rows, before))
        return results_of(rows)
    findings = []
    for family in args.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        findings.append(try_family(family))
        say(f"{family}: {findings[-1].outcome} ({findings[-1].detail})")
    if args.write is not None:
        args.write.write_text(with_section(_document(findings), rows, before) if rows else _document(findings))
    count = Counter(finding.outcome for finding in findings)
    return [
        *(results_of(rows) if rows else ()),
        Result("architectures served", count[SERVED], "families"),
        Result("architectures refused, with a reason", count[REFUSED], "families"),
        Result("architectures not tried", count[NOT_BUILT], "families"),
        at_most(0, Result("architectures served wrongly", count[DIFFERENT], "families")),
    ]


def try_family(family: str) -> Finding:
    """Build a tiny model, load it with our runtime, and compare the logits."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        path = Path(folder)
        eager = _build(family, path)
        if isinstance(eager, Exception):
            return Finding(family, NOT_BUILT, _line(eager))
        try:
            config = EngineConfig(folder, kv_cache_tokens=2048, deterministic=True)
            runtime = ModelRuntime(loader.load(config, lambda _: None), config)
        except StartupError as error:
            return Finding(family, REFUSED, _line(error).replace(folder, "it"))
        difference = _difference(runtime, eager)
        ranks, of_ranks = on_two_ranks(path, partial(_difference, eager=eager), TOLERANCE)
    is_right = max(difference, of_ranks) <= TOLERANCE
    return Finding(family, SERVED if is_right else DIFFERENT, f"{difference:.0e}", ranks)


def _build(family: str, path: Path) -> Any:
    """The model with eager attention, also saved as a checkpoint at `path`; or the error if no set of sizes works."""
    sizes = {**SIZES, **SPECIAL.get(family, {})}
    without_heads = {name: value for name, value in sizes.items() if name != "head_dim"}
    basic = {name: value for name, value in sizes.items() if name in BASIC or name.endswith("_token_id")}
    problem: Exception | None = None
    for attempt in (sizes, without_heads, basic):
        try:
            return _built(family, path, attempt)
        except Exception as error:  # noqa: BLE001  an architecture may raise anything for unusual sizes
            problem = problem or error
    return problem


def _built(family: str, path: Path, sizes: Mapping[str, Any]) -> Any:
    """Build and save the model. Raises: anything that the architecture's code raises."""
    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        size = sum(part.numel() for part in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"it has {size / 1e6:.0f}M parameters with the sizes of a tiny model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(path)
    vocab = {f"t{token}": token for token in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(path / "tokenizer.json"))
    _eager_logits(model, [3, 4, 5])
    return model


@torch.inference_mode()
def _eager_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position.  # [len(ids), V]"""
    logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0, :, :VOCAB_SIZE]
    return logits.float()


def _difference(runtime: ModelRuntime, eager: Any) -> float:
    """The largest difference of a logit over the largest logit; infinite if any is NaN."""
    rng = random.Random(1)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(30)]
    tree = TokenTree(tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(6)), (ROOT, 0, 0, 1, 2, ROOT))
    kv = runtime.cache.new_sequence()
    runtime.forward([StepRows(kv, prompt[:17], wants_logits=False)])
    got = runtime.forward([StepRows(kv, prompt[17:], tree)])
    want = [_eager_logits(eager, prompt)[-1]]
    for node in range(len(tree)):
        path, above = [], node
        while above != ROOT:
            path.append(tree.tokens[above])
            above = tree.parents[above]
        want.append(_eager_logits(eager, [*prompt, *reversed(path)])[-1])
    expected = torch.stack(want)
    difference = float((got - expected).abs().max() / expected.abs().max())
    return float("inf") if math.isnan(difference) else difference


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]


def _document(findings: Sequence[Finding]) -> str:
    import transformers

    tested = ", ".join(TESTED)
    recurrent = ", ".join(sorted(RECURRENT))
    lines = [HEADER.format(version=transformers.__version__, tolerance=TOLERANCE, tested=tested, recurrent=recurrent)]
    for outcome in (SERVED, REFUSED, DIFFERENT, NOT_BUILT):
        chosen = [finding for finding in findings if finding.outcome == outcome]
        if chosen:
            columns = ["largest difference", "on two ranks"] if outcome in (SERVED, DIFFERENT) else ["why"]
            head = ["model type", *columns]
            lines += [f"## {outcome.capitalize()}: {len(chosen)}", "", _row(head), _row(["---"] * len(head))]
            lines += [
                _row([f"`{finding.family}`", *[finding.detail, finding.ranks][: len(columns)]]) for finding in chosen
            ]
            lines.append("")
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
