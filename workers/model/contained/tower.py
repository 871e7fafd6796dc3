"""A causal language model made of a text tower that transformers has only inside of a multimodal model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast


def tower_class(config_class: Any, base: Any, plan: Mapping[str, str]) -> Any:
    """A class with the modules and names of other causal language models: `model`, a `base`, and `lm_head`.

    `plan` is a tensor-parallel plan of `base`, if its configuration has none.
    """
    name = f"{base.__name__.removesuffix('Model')}ForCausalLM"
    family = base.__bases__[0]  # the PreTrainedModel that initializes this family's modules
    return type(
        name,
        (_Tower, family, GenerationMixin),
        {
            "__module__": __name__,
            "__qualname__": name,
            "base_class": base,
            "config_class": config_class,
            "base_model_prefix": "model",
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
            "_tp_plan": {"lm_head": "colwise_gather_output", **{f"model.{name}": plan[name] for name in plan}},
        },
    )


class _Tower:
    """Attributes of a tower's class that its family's class lacks."""

    base_class: Any
    model: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # the family's
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self, input_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the rows in `logits_to_keep`, or of that number of last rows; 0 is all."""
        outputs = self.model(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Tensor = self.lm_head(outputs.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)
