"""The most used open checkpoints of today: each with its real config.json made small, against transformers, by tokens.

Random weights are stored as the checkpoint's are (quantized, under the names of a multimodal model), loaded as a user's
are, and decoded greedily by the engine with drafts that are partly wrong. transformers' own class computes the same
tokens from the weights that are meant. What the published checkpoint needs follows from its config.json. Must not know
which checkpoints are served: the run finds out.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from bench.checkpoints.published import FIRST_TOKEN, VOCAB_SIZE, Published
from bench.checkpoints.stored import quantized
from bench.engine.driver import load_engine, new_stream, play
from bench.results import Result, at_least, at_most, say
from core.config import EngineConfig
from core.costs import GPUS, Placed
from core.errors import StartupError, UnsupportedModel
from core.speculation import ROOT, TokenTree
from workers.model import Outline, outline_of

SERVED, REFUSED, DIFFERENT = "served", "refused", "DIFFERENT"
MIN_SERVED = 24
"""Goal for the thirty checkpoints."""
NUM_PROMPT, NUM_TOKENS = 30, 24
CHAIN = 3
"""Guesses of a round, of which the last is wrong."""
STD = 0.1
TYPES = {"kimi_k2": "deepseek_v3"}
"""transformers' type for a checkpoint that comes with code of its own."""
PLACES = (("l4", 1), ("h100", 1), ("h200", 1), ("h200", 2), ("h200", 4), ("h200", 8), ("b300", 1), ("b300", 8))
"""GPUs that a checkpoint may run on, in the order of preference."""
MANY = 100
KV_TOKENS, STEP_TOKENS = 32_768, 2048
"""KV that has to fit beside the weights, and rows of a step."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of one checkpoint."""

    name: str
    size: str
    stored_as: str
    outcome: str
    detail: str
    """The GPUs that it needs, or why it is refused."""


def results_of(rows: Sequence[Tried]) -> list[Result]:
    """The number of each outcome, with its goal, which some of them alone cannot reach."""
    count = Counter(row.outcome for row in rows)
    served = Result("checkpoints served", count[SERVED], "")
    return [
        at_least(MIN_SERVED, served) if len(rows) >= MIN_SERVED else served,
        Result("checkpoints refused, with a reason", count[REFUSED], ""),
        at_most(0, Result("checkpoints served wrongly", count[DIFFERENT], "")),
    ]


def try_checkpoint(published: Published) -> Tried:
    """Compare the small checkpoint's tokens, and find where the published one fits."""
    logging.getLogger("workers").setLevel(logging.ERROR)  # it says that these tokenizers have no grammars
    outcome, detail = _tried_small(published)
    if outcome == SERVED:
        try:
            detail = _needs(published)
        except StartupError as error:
            outcome, detail = REFUSED, _line(error)
    say(f"{published.name}: {outcome} ({detail})")
    return Tried(published.name, _size(published), published.stored_as, outcome, detail)


def _tried_small(published: Published) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        path = Path(folder)
        model = _written(published.small_config, path)
        prompt = random.Random(1).choices(range(FIRST_TOKEN, VOCAB_SIZE), k=NUM_PROMPT)
        wanted = _by_transformers(model, prompt)
        try:
            got = _by_engine(path, prompt, wanted)
        except StartupError as error:
            return REFUSED, _line(error).replace(f"{path}/", "").replace(folder, "it")
    same = next((place for place, pair in enumerate(zip(got, wanted, strict=True)) if len({*pair}) > 1), None)
    return (SERVED, "") if same is None else (DIFFERENT, f"token {same + 1} of {NUM_TOKENS} differs")


def _written(config: dict[str, Any], path: Path) -> Any:
    """Write a checkpoint with random weights. Returns transformers' model with the weights that are meant."""
    whole = _whole_model(config)
    meant_at = path / "meant"
    whole.save_pretrained(meant_at)
    stored = meant = load_file(meant_at / "model.safetensors")
    if "quantization_config" in config:
        stored, meant = quantized(meant, config["quantization_config"])
        save_file(meant, meant_at / "model.safetensors", {"format": "pt"})
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({f"t{token}": token for token in range(VOCAB_SIZE)}, unk_token="t0")).save(
        str(path / "tokenizer.json")
    )
    return type(whole).from_pretrained(meant_at, attn_implementation="eager", dtype=torch.float32).eval()


def _whole_model(config: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    model = _model(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=STD)
    return model


def _model(config: Mapping[str, Any]) -> Any:
    kind = TYPES.get(config["model_type"], config["model_type"])
    values = {name: value for name, value in config.items() if name not in ("quantization_config", "auto_map")}
    model_config = CONFIG_MAPPING[kind].from_dict({**values, "model_type": kind})
    is_multimodal = model_config.get_text_config() is not model_config
    maker = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
    return maker.from_config(model_config, dtype=torch.float32)


@torch.inference_mode()
def _by_transformers(model: Any, prompt: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1, :VOCAB_SIZE].argmax()))
    return tokens[len(prompt) :]


def _by_engine(path: Path, prompt: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """The engine's tokens, verified in chains of `guesses` whose last is wrong. Raises: StartupError."""
    engine = load_engine(EngineConfig(str(path), kv_cache_tokens=2048))
    stream = new_stream("stream", prompt)
    while (done := len(stream.output)) < NUM_TOKENS:
        chain = [*guesses[done : done + CHAIN]]
        chain[-1] = FIRST_TOKEN + (chain[-1] + 1 - FIRST_TOKEN) % (VOCAB_SIZE - FIRST_TOKEN)
        play(engine, [stream], [TokenTree(tuple(chain), tuple(range(ROOT, ROOT + len(chain))))])
    return list(stream.output[:NUM_TOKENS])


# What the published checkpoint needs


def _needs(published: Published) -> str:
    """The least GPUs that it fits on, and its context. Raises: StartupError if it fits nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(published.config))
        config = EngineConfig(str(file), dtype="bfloat16")
        found = outline_of(config)
        fitting = [place for place in PLACES if _fits(found, *place)]
        why_not = {place: _why_not_split(replace(config, tensor_parallel=place[1])) for place in fitting}
    good = next((place for place, problem in why_not.items() if problem is None), None)
    if good is not None:
        why = f" ({found.limit})" if found.limit else ""
        return f"bfloat16, {good[1]} x {good[0].upper()}, up to {found.max_context_tokens:,} tokens{why}"
    for (name, count), problem in why_not.items():
        raise UnsupportedModel(f"{_weights(found)}, which {count} {name.upper()} hold, but {problem}")
    name, count = PLACES[-1]
    raise UnsupportedModel(f"{_weights(found)}, more than {count} {name.upper()} hold beside a step and KV")


def _fits(found: Outline, name: str, count: int) -> bool:
    return Placed(found.shape, GPUS[name], count).kv_tokens(STEP_TOKENS) >= KV_TOKENS


def _weights(found: Outline) -> str:
    return f"its weights take {found.shape.weight_bytes / 1e9:,.0f} GB in bfloat16"


def _why_not_split(config: EngineConfig) -> str | None:
    try:
        outline_of(config)
    except UnsupportedModel as error:
        return _line(error)
    return None


def _size(published: Published) -> str:
    with torch.device("meta"):
        billions = sum(parameter.numel() for parameter in _model(published.config).parameters()) / 1e9
    return f"{billions:,.0f}B" if billions >= MANY else f"{billions:.3g}B"


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
