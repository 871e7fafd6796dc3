"""MTP heads: a layer of the target's own checkpoint that predicts one token more, applied again to its own output.

The row of token i reads the embedding of token i and the feature of token i - 1, as an EAGLE head's does
(`workers.heads.eagle`): the target's last hidden state for a token that is committed, the layer's own output for one
that it guessed. Its attention and its experts are transformers' own code for the target's family, with the attention
function of the runtime.

Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; `docs/adr/models.md` for what families do differently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import EngineConfig
from core.errors import CheckpointError
from workers.attention import PagedPlan
from workers.heads.state_heads import LastStateConfig
from workers.heads.tensors import check_finite, check_tensors
from workers.model import LoadedModel, MtpKind, has_mtp, load_mtp, tensor_names
from workers.sampling import DraftVocabulary
from workers.step import LayerShape, StepPlan


@dataclass(frozen=True, slots=True)
class MtpConfig(LastStateConfig):
    """The MTP layer of a checkpoint."""


class MtpHead(nn.Module):
    """Computes rows of an MTP layer."""

    mask_token: ClassVar[int | None] = None
    tokens: ClassVar[DraftVocabulary | None] = None

    def __init__(self, config: MtpConfig, loaded: LoadedModel, kind: MtpKind, joining: Mapping[str, Tensor]) -> None:
        """`loaded`: the layer as a model of one layer. `joining`: weights by the
        names of `JOINING` in `workers.model`."""
        super().__init__()
        self.config = config
        self.num_parameters = loaded.info.num_parameters
        self._kind, self._shapes, self._vocab_size = kind, loaded.layers, loaded.info.vocab_size
        self.num_columns = self._vocab_size
        self._model = loaded.model
        self._layers = loaded.model.base_model
        self._norm, self._layers.norm = self._layers.norm, nn.Identity()
        self._enorm, self._hnorm = (_norm_like(self._norm, joining[name]) for name in ("enorm", "hnorm"))
        self._projection = joining["eh_proj"]

    @property
    def model(self) -> Any:
        """The layer between the target's embedding and output layer, as a model of one layer."""
        return self._model

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of a row's storage: KV, then its output, of which the feature of guesses below it is made."""
        return (*self._shapes, LayerShape(1, self.config.hidden_size, 0))

    def features_of(self, states: Tensor) -> Tensor:
        """Features from the target's hidden states: these states."""
        return states

    def forward(self, ids: Tensor, positions: Tensor, features: Tensor, plan: StepPlan | PagedPlan) -> Tensor:
        """Outputs of all rows before the norm, after writing their KV.  # [T], [T], [T, hidden] -> [T, hidden]"""
        embedded = self._model.get_input_embeddings()(ids)
        if self._kind.blanks_first:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        joined = torch.cat([self._enorm(embedded), self._hnorm(features)], dim=-1)
        hidden = F.linear(joined, self._projection)[None]
        found = self._layers(inputs_embeds=hidden, position_ids=positions.long()[None], use_cache=False, plan=plan)
        outputs: Tensor = found.last_hidden_state[0]
        return outputs

    def own_features(self, outputs: Tensor) -> Tensor:
        """Features of guesses from the outputs of the rows above them."""
        features: Tensor = self._norm(outputs) if self._kind.passes_norm_on else outputs
        return features

    def scores(self, outputs: Tensor) -> Tensor:
        """float32 logits over the target's vocabulary.  # [W, vocab]"""
        logits: Tensor = self._model.get_output_embeddings()(self._norm(outputs))
        return logits[:, : self._vocab_size].float()

    def logits_of(self, scores: Tensor) -> Tensor:
        """The same."""
        return scores


def is_mtp(path: str, model: str | None) -> bool:
    """Whether a directory is a checkpoint with an MTP layer. `model`: directory of the target."""
    if model is not None and Path(path).resolve() == Path(model).resolve():
        return True
    return has_mtp(tensor_names(sorted(Path(path).glob("*.safetensors"))))


def read_mtp(path: str, stored: Mapping[str, Any]) -> MtpConfig:
    """The MTP layer of a checkpoint with this config.json. Raises: CheckpointError."""
    sizes = stored.get("text_config") or stored
    for name in ("hidden_size", "vocab_size"):
        if not isinstance(sizes.get(name), int):
            raise CheckpointError(f"{Path(path) / 'config.json'}: {name} must be a number, got {sizes.get(name)!r}")
    return MtpConfig(Path(path).resolve().name, sizes["hidden_size"], sizes["vocab_size"])


def mtp_settings(config: EngineConfig) -> EngineConfig:
    """Settings by which the layer is read: from the directory of the head, on a single rank."""
    assert config.head is not None
    return replace(
        config, model=config.head, head=None, layers=None, tensor_parallel=1, expert_parallel=False, compile=False
    )


def load_mtp_head(
    own: MtpConfig, config: EngineConfig, progress: Callable[[str], None], target: Any = None
) -> tuple[MtpHead, LoadedModel]:
    """Load the head of `config.head`, and the model of one layer in it. Of a loaded `target` it takes the embedding and
    the output layer, if they are the same. Raises: StartupError."""
    of_layer = mtp_settings(config)
    loaded, kind, joining = load_mtp(of_layer)
    path, size = of_layer.model, own.hidden_size
    progress(f"loaded the MTP layer of {own.name}: {loaded.info.num_parameters / 1e6:.1f}M parameters")
    check_tensors(path, {"enorm": (size,), "hnorm": (size,), "eh_proj": (size, 2 * size)}, joining)
    check_finite(path, dict(loaded.model.named_parameters()))
    if target is not None:
        _share(loaded.model, target)
    return MtpHead(own, loaded, kind, joining), loaded


def _share(model: Any, target: Any) -> None:
    """Take the target's embedding and output layer in place of equal ones: they are the largest of its tensors."""
    if torch.equal(model.get_input_embeddings().weight, target.get_input_embeddings().weight):
        model.set_input_embeddings(target.get_input_embeddings())
    if torch.equal(model.get_output_embeddings().weight, target.get_output_embeddings().weight):
        model.set_output_embeddings(target.get_output_embeddings())


def _norm_like(norm: nn.Module, weight: Tensor) -> nn.Module:
    """A norm of the same kind with another weight."""
    found = copy.deepcopy(norm)
    found.weight = nn.Parameter(weight, requires_grad=False)
    return found
