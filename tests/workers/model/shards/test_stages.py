"""The stages of a model compute, one after the other, what the whole model does, bit for bit."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from core.config import EngineConfig
from core.errors import ConfigError, UnsupportedModel
from tests import checkpoints
from tests.workers.parallel.test_parallel import all_kinds_of_steps
from workers.model import ModelShard, PipelineStage, loader
from workers.model.shards.sharding import LocalCollectives
from workers.model.shards.stages import Elsewhere
from workers.runtime.backends import ProgramBackend
from workers.runtime.runtime import ModelRuntime

SERVED = sorted({*checkpoints.FAMILIES, *checkpoints.EXPERTS, "opt"})


class Passed:
    """Links to stages that run one after the other: all steps of one, then all of the next."""

    def __init__(self, received: deque[Tensor]) -> None:
        self.received, self.sent = received, deque[Tensor]()

    def receive(self, like: Tensor) -> Tensor:
        states = self.received.popleft()
        assert (states.shape, states.dtype) == (like.shape, like.dtype)
        return states

    def send(self, states: Tensor) -> None:
        self.sent.append(states.clone())

    def logits(self, own: Tensor) -> Tensor:
        return own


def in_stages(path: Path, num_stages: int, **settings: Any) -> tuple[list[ModelRuntime], list[Tensor]]:
    """The runtimes of all stages, and what the last one gives."""
    config = EngineConfig(str(path), kv_cache_tokens=4096, pipeline_parallel=num_stages, **settings)
    runtimes, sent, logits = list[ModelRuntime](), deque[Tensor](), list[Tensor]()
    for index in range(num_stages):
        shard = ModelShard(0, 1, stage=PipelineStage(index, num_stages))
        loaded, links = loader.load(config, lambda _: None, shard), Passed(sent)
        shard.connect(LocalCollectives(1), links)
        runtimes.append(ModelRuntime(loaded, config))
        logits = all_kinds_of_steps(runtimes[-1])
        assert not links.received, "states were sent that nobody received"
        sent = links.sent
    return runtimes, logits


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whole models be run by their own code too, whose last bits a program does not have."""
    monkeypatch.setattr(ProgramBackend, "supports", lambda _: False)


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("family", SERVED)
def test_two_stages_compute_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    path = checkpoints.write(family, tmp_path)
    _, logits = in_stages(path, 2)
    for got, whole in zip(logits, all_kinds_of_steps(checkpoints.runtime(path)), strict=True):
        assert torch.equal(got, whole)


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_their_own_part_and_nothing_else(tied: bool, tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path, num_hidden_layers=5, tie_word_embeddings=tied)
    runtimes, logits = in_stages(path, 3, dtype="bfloat16")
    whole = checkpoints.runtime(path, dtype="bfloat16")
    assert all(map(torch.equal, logits, all_kinds_of_steps(whole)))
    models = [runtime.context.model for runtime in runtimes]
    held = [[i for i, layer in enumerate(model.model.layers) if not isinstance(layer, Elsewhere)] for model in models]
    assert held == [[0, 1], [2, 3], [4]]
    layers = [{name for name, _ in model.named_parameters() if ".layers." in name} for model in models]
    assert set.union(*layers) == {name for name, _ in whole.context.model.named_parameters() if ".layers." in name}
    assert all(one.isdisjoint(other) for one, other in pairwise(layers))
    ends = [{name for name, _ in model.named_parameters() if ".layers." not in name} for model in models]
    norm, embedding, output = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
    assert ends == [{embedding, norm}, {norm}, {norm, embedding, output} if tied else {norm, output}]
    if tied:
        assert models[2].lm_head.weight.data_ptr() == models[2].model.embed_tokens.weight.data_ptr()
    num_bytes = [sum(keys.nbytes for keys in runtime.cache.keys) for runtime in runtimes]
    assert num_bytes[0] == num_bytes[1] == 2 * num_bytes[2], "KV is that of a stage's own layers"
    assert all(runtime.info == whole.info for runtime in runtimes)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "shares"), [(80, 2, [40, 40]), (5, 3, [2, 2, 1]), (3, 3, [1, 1, 1])]
)
def test_spare_layers_go_to_the_early_stages(num_layers: int, num_stages: int, shares: list[int]) -> None:
    spans = [PipelineStage(index, num_stages).layers(num_layers) for index in range(num_stages)]
    assert [len(span) for span in spans] == shares
    assert [layer for span in spans for layer in span] == [*range(num_layers)]


@pytest.mark.parametrize(
    ("family", "num_stages", "reason"),
    [
        ("llama", 3, "pipeline_parallel is 3, but llama has 2 layers"),
        ("mamba", 2, "mamba has recurrent layers, which are served by one rank only.* pipeline_parallel to 1"),
        ("t5", 2, "pipeline_parallel must be 1: t5 is an encoder-decoder"),
    ],
)
def test_what_has_no_stages_is_refused_before_its_weights_are_read(
    family: str, num_stages: int, reason: str, tmp_path: Path
) -> None:
    path = checkpoints.write(family, tmp_path)
    (path / "model.safetensors").write_bytes(b"nobody reads this")
    with pytest.raises(UnsupportedModel, match=reason):
        loader.check_checkpoint(EngineConfig(str(path), pipeline_parallel=num_stages))


@pytest.mark.parametrize(
    "settings", [{"feature_layers": (1,)}, {"head": "somewhere"}, {"layers": (0,)}, {"quantize": "int8"}]
)
def test_settings_that_need_one_rank_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} must be .*pipeline_parallel"):
        EngineConfig("m", pipeline_parallel=2, **settings)


class ReadsEmbedding(modeling_llama.LlamaModel):
    """Its last layer reads the embedding of the tokens again, as some models' do."""

    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        again: Tensor = self.embed_tokens(input_ids)

        def adding(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0] + again, *args[1:])

        hook = self.layers[-1].mlp.register_forward_pre_hook(adding)
        try:
            return super().forward(input_ids, **others)
        finally:
            hook.remove()


class ReadsLayer(modeling_llama.LlamaModel):
    """Adds the output of its first layer again at the end."""

    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        given = list[Tensor]()
        hooks = [
            self.layers[0].register_forward_hook(lambda _, args, output: given.append(output)),
            self.norm.register_forward_pre_hook(lambda _, args: (args[0] + given[0],)),
        ]
        try:
            return super().forward(input_ids, **others)
        finally:
            for hook in hooks:
                hook.remove()


@pytest.mark.parametrize("kind", [ReadsEmbedding, ReadsLayer])
def test_a_model_whose_last_layers_read_more_than_the_states_is_refused(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.write("llama", tmp_path)
    monkeypatch.setattr(modeling_llama, "LlamaModel", kind)
    config = EngineConfig(str(path), pipeline_parallel=2)
    with pytest.raises(UnsupportedModel, match="llama reads more from layer 1 on than the layers before give"):
        loader.load(config, lambda _: None, ModelShard(0, 1, stage=PipelineStage(1, 2)))


def test_one_process_does_not_take_one_stage_for_the_model(tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path)
    with pytest.raises(ConfigError, match="pipeline_parallel is 2, but this engine runs on its own"):
        loader.load(EngineConfig(str(path), pipeline_parallel=2), lambda _: None)
