"""Says at load whether an EAGLE-3 head fits the layers that its files name better than those beside them.

Publishers count layers in two ways (docs/adr/models.md). With states of the wrong layers a head still guesses, and only
its acceptance falls. So the target writes a short text, and the head's guesses are compared with the target's choices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig

from core.config import EngineConfig
from core.errors import first_line
from core.records import Features
from workers.attention import ATTENTION, is_latent
from workers.heads import EagleHead
from workers.model import LoadedModel, layer_list, quiet_transformers
from workers.runtime.heads.kv_head_runtime import KVHeadRuntime
from workers.step import StepRows

logger = logging.getLogger(__name__)

NUM_TOKENS: Final = 64
SHIFTS: Final = (0, -1, 1)
CLEARLY: Final = 0.1
"""Share of guesses by which layers must be better to be called so: two standard errors of a share of `NUM_TOKENS`."""


@torch.inference_mode()
def report_layers(head: object, loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None]) -> None:
    """Report how well the head agrees with this target by its layers, and by those one lower and one higher."""
    if not isinstance(head, EagleHead) or not _can_tell(head, loaded):
        return
    try:
        _report(head, loaded, config, progress)
    except Exception as error:  # noqa: BLE001  of the model's own code; the head serves all the same
        logger.warning("which layers the head %s fits is not known: %s", head.config.name, first_line(error))


def _report(head: EagleHead, loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None]) -> None:
    with quiet_transformers(), _plain_attention(loaded.model):
        text = _written(loaded)
        states, choices = _states(loaded.model, text)
    own = head.config.feature_layers
    by_layers = {tuple(layer + shift for layer in own): 0.0 for shift in SHIFTS}
    for layers in [layers for layers in by_layers if min(layers) >= 0 and max(layers) < len(states)]:
        features = torch.cat([states[layer] for layer in layers], dim=-1)[:-1]
        guesses = _guesses(KVHeadRuntime(head, loaded.info, _settings(config)), text, features)
        by_layers[layers] = float((guesses == choices[1:]).float().mean())
    shares = ", ".join(f"{share:.2f} by layers {list(layers)}" for layers, share in by_layers.items())
    progress(f"the head {head.config.name} guesses the target's choice in {shares}, of {len(text) - 1} tokens")
    best = max(by_layers, key=lambda layers: by_layers[layers])
    if by_layers[best] > by_layers[own] + CLEARLY:
        logger.warning(
            "the head %s fits layers %s better than %s, which its files name: set feature_layers in its config.json",
            *(head.config.name, list(best), list(own)),
        )


def _can_tell(head: EagleHead, loaded: LoadedModel) -> bool:
    """Whether the head's layers may be others than they seem, and transformers' own code can run the model."""
    is_split = loaded.shard is not None
    is_own_code = bool(loaded.mixers) or any(map(is_latent, loaded.model.modules()))
    return head.config.is_eagle3 and not head.config.are_layers_given and not is_split and not is_own_code


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Run the model as transformers does, before a runtime takes it."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)


def _written(loaded: LoadedModel) -> list[int]:
    """A text of the model's own, drawn at temperature 1."""
    first = loaded.info.bos_token_id or 0
    num = min(NUM_TOKENS, loaded.info.max_context_tokens) - 1
    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=num, min_new_tokens=num, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = loaded.model.generate(torch.tensor([[first]], device=loaded.model.device), settings)
    found: list[int] = tokens[0].clamp(max=loaded.info.vocab_size - 1).tolist()
    return found


def _states(model: Any, text: list[int]) -> tuple[list[Tensor], Tensor]:
    """The input of each layer, then the last one's output, before the final norm; and the model's choice of each next
    token.  # [T, hidden] each, [T]"""
    last: list[Any] = []
    _, layers = layer_list(model)
    hook = layers[-1].register_forward_hook(lambda _module, _args, output: last.append(output))
    try:
        output = model(torch.tensor([text], device=model.device), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    end = last[0] if isinstance(last[0], Tensor) else last[0][0]
    return [state[0] for state in (*output.hidden_states[:-1], end)], output.logits[0].argmax(dim=-1)


def _settings(config: EngineConfig) -> EngineConfig:
    return replace(config, kv_cache_tokens=NUM_TOKENS, share_prefixes=False, tensor_parallel=1)


def _guesses(runtime: KVHeadRuntime, text: list[int], features: Tensor) -> Tensor:
    """The head's likeliest token after each token but the first.  # [T, F] -> [T]"""
    rows = features.to(torch.bfloat16).contiguous().cpu().view(torch.int16).numpy().tobytes()
    kv = runtime.cache.new_sequence()
    runtime.forward([StepRows(kv, text, features=Features(0, features.shape[1], rows))])
    return runtime.logits_of(kv).argmax(dim=-1)
