"""A grown checkpoint computes what its source computes, and costs what its size says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.models.grow import FILLER_STD, INDEX, cached, grow
from bench.models.sizes import SIZES, UNIT_MULTIPLE, CannotGrow, Shape, Size, parse_size, read_shape, shape_of_size
from core.config import EngineConfig
from core.records import Sampling, SequenceSpec, Stamp, VerifyRequest
from core.text.token_log import TokenLog
from workers.engine.target import TargetEngine

DEMO = Path(__file__).parents[3] / "models" / "demo"
TARGET, DRAFT = read_shape(DEMO / "target"), read_shape(DEMO / "draft")
SOURCES = {"target": TARGET, "draft": DRAFT}
PROMPTS = [
    "def parse_args(self, args):\n    for name in args:\n        if not isinstance(name, str):\n            raise",
    "import os\nimport sys\n\n\nclass Path:\n    def __init__(self, *parts):\n        self._parts = parts\n",
    '    """Return the number of lines.\n\n    The file is read once.\n    """\n    with open(path) as file:\n        ',
]
NUM_TOKENS = 16
WIDER = {
    "draft": replace(
        DRAFT,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=1024,
    ),
    "target": replace(
        TARGET,
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=1024,
    ),
}
"""Four times as wide, two layers deeper, more query heads in each group."""


ROLES = pytest.mark.parametrize("role", ["draft", pytest.param("target", marks=pytest.mark.ci)])
"""A grown target has 120M parameters, and shows what a grown draft of 8M does."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Where the tests of this module grow their checkpoints, each once."""
    return tmp_path_factory.mktemp("grown")


def logits(model: Path, dtype=torch.float32) -> list[torch.Tensor]:
    """The checkpoint's logits after each token of each prompt, as computed by transformers."""
    loaded, report = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.inference_mode():
        return [loaded.eval()(torch.tensor([tokenizer(text)["input_ids"]])).logits[0].float() for text in PROMPTS]


def assert_same_function(grown: Path, source: Path) -> None:
    for ours, theirs in zip(logits(grown), logits(source), strict=True):
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@ROLES
def test_the_function_stays(directory, role, dtype):
    """In either format: at four times the width the weights of both are exact."""
    assert_same_function(cached(DEMO / role, WIDER[role], dtype, directory), DEMO / role)


@pytest.mark.ci
@pytest.mark.parametrize(
    "shape",
    [
        replace(DRAFT, num_hidden_layers=5),
        replace(DRAFT, hidden_size=256, num_attention_heads=8, num_key_value_heads=2),
        replace(DRAFT, num_attention_heads=8, intermediate_size=512),
    ],
    ids=["deeper", "twice as wide", "same width"],
)
def test_the_function_stays_in_other_shapes(directory, shape):
    assert_same_function(cached(DEMO / "draft", shape, "float32", directory), DEMO / "draft")


@ROLES
def test_bfloat16_arithmetic_differs_by_rounding_alone(directory, role):
    """No further from the source's own than that is from float32, and another choice only where two are as near."""
    exact, source = logits(DEMO / role), logits(DEMO / role, torch.bfloat16)
    grown = logits(cached(DEMO / role, WIDER[role], "bfloat16", directory), torch.bfloat16)
    rounding = max(float((a - b).abs().max()) for a, b in zip(exact, source, strict=True))
    for ours, theirs in zip(grown, source, strict=True):
        assert float((ours - theirs).abs().max()) <= 1.5 * rounding
        first, second = theirs.topk(2).values.unbind(-1)
        assert torch.all((ours.argmax(-1) == theirs.argmax(-1)) | (first - second <= 2 * rounding))


def greedy(model: Path) -> list[list[int]]:
    """Plain greedy decoding of each prompt by our own engine."""
    engine = TargetEngine.load(EngineConfig(str(model), kv_cache_tokens=512, deterministic=True), 1, lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [decoded(engine, f"s{number}", tokenizer(text)["input_ids"]) for number, text in enumerate(PROMPTS)]


def decoded(engine: TargetEngine, session: str, prompt: list[int]) -> list[int]:
    log = TokenLog(prompt)
    spec, held = SequenceSpec(len(log), Sampling(temperature=0.0)), 0
    output: list[int] = []
    for number in range(NUM_TOKENS):
        engine.add(VerifyRequest(Stamp(session, 1, number + 1), log.base(held), log.since(held), spec=spec))
        replies = engine.step()
        while not replies:
            replies = engine.step()
        verdict = replies[0]
        log.extend([verdict.next_token])
        output.append(verdict.next_token)
        held = verdict.held
    return output


@pytest.mark.ci
@ROLES
def test_the_target_engine_writes_the_same_text(directory, role):
    expected = greedy(DEMO / role)
    assert all(len(set(tokens)) > 4 for tokens in expected), "texts that say something"
    assert greedy(cached(DEMO / role, WIDER[role], "float32", directory)) == expected


def tensors(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@ROLES
def test_no_part_of_a_matrix_product_can_be_skipped(directory, role, dtype):
    """No row of a matrix is zero, and no column but where all that reads it is new and must ignore it."""
    grown = cached(DEMO / role, WIDER[role], dtype, directory)
    matrices = {name: tensor for name, tensor in tensors(grown).items() if "proj" in name or "lm_head" in name}
    assert len(matrices) == 7 * WIDER[role].num_hidden_layers + 1
    for name, tensor in matrices.items():
        layer = int(name.split(".")[2]) if "layers" in name else 0
        is_deaf = layer >= SOURCES[role].num_hidden_layers and ("v_proj" in name or "up_proj" in name)
        num_silent = SOURCES[role].hidden_size if is_deaf else 0
        assert tensor.any(1).all(), name
        assert tensor[:, num_silent:].any(0).all(), name
        assert not tensor[:, :num_silent].any(), name
        assert tensor.count_nonzero() > 0.4 * tensor.numel(), name


def test_the_filler_is_random_and_full(directory):
    grown = tensors(cached(DEMO / "draft", WIDER["draft"], "float32", directory))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        tensor = grown[f"model.layers.3.{name}.weight"]
        assert tensor.count_nonzero() > 0.9999 * tensor.numel()
        assert float(tensor.std()) == pytest.approx(FILLER_STD, rel=0.05)
        assert tensor.unique().numel() > 0.8 * tensor.numel()


@ROLES
def test_the_shape_counts_the_parameters_that_are_written(directory, role):
    grown, shape = cached(DEMO / role, WIDER[role], "bfloat16", directory), WIDER[role]
    assert sum(tensor.numel() for tensor in tensors(grown).values()) == shape.num_parameters
    assert {tensor.dtype for tensor in tensors(grown).values()} == {torch.bfloat16}
    assert read_shape(grown) == shape


def test_loaders_are_told_the_format_and_that_the_output_has_a_matrix_of_its_own(directory):
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(cached(DEMO / "draft", WIDER["draft"], dtype, directory))
        assert model.dtype == getattr(torch, dtype)
        assert sum(parameter.numel() for parameter in model.parameters()) == WIDER["draft"].num_parameters
        assert not model.config.tie_word_embeddings


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes_are_what_they_say(name):
    shape = shape_of_size(TARGET, parse_size(name))
    assert shape.num_parameters == pytest.approx(SIZES[name].num_parameters, rel=0.01)
    assert (shape.hidden_size // TARGET.hidden_size) in (4, 16), "exact in bfloat16"


@given(num_parameters=st.floats(8e6, 1e11), source=st.sampled_from([TARGET, DRAFT]))
def test_any_size_has_a_shape_that_holds_its_source(num_parameters, source):
    shape = shape_of_size(source, Size(num_parameters))
    one_more = 3 * shape.hidden_size * shape.num_hidden_layers * UNIT_MULTIPLE
    assert abs(shape.num_parameters - num_parameters) <= one_more
    assert all(getattr(shape, name) >= getattr(source, name) for name in Shape.__slots__)
    assert shape.group % source.group == 0
    assert shape.num_attention_heads * shape.head_dim == shape.hidden_size


@pytest.mark.parametrize("text", ["", "large", "12", "M", "-3M", "0M", "infM", "nanB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_too_small_a_size_is_refused():
    with pytest.raises(CannotGrow, match="no room"):
        shape_of_size(TARGET, parse_size("2M"))


@pytest.mark.parametrize(
    ("changes", "shape", "reason"),
    [
        ({}, replace(DRAFT, hidden_size=64), "does not contain"),
        ({}, replace(DRAFT, num_hidden_layers=1), "does not contain"),
        ({}, replace(DRAFT, num_key_value_heads=4), "multiple of the source's 2"),
        ({}, replace(DRAFT, num_attention_heads=8, num_key_value_heads=3), "multiple of the source's 2"),
        (
            {},
            replace(DRAFT, hidden_size=384, num_attention_heads=12, num_key_value_heads=4),
            "multiple of the source's 2",
        ),
        ({}, replace(DRAFT, num_attention_heads=12), "divide the width"),
        ({}, replace(DRAFT, head_dim=64), "size of a head"),
        ({"mlp_bias": True}, DRAFT, "without biases"),
        ({"model_type": "qwen2"}, DRAFT, "Llama"),
        ({"tie_word_embeddings": False}, DRAFT, "tied"),
    ],
)
def test_what_cannot_be_grown_is_refused_before_anything_is_written(tmp_path, changes, shape, reason):
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((DEMO / "draft" / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CannotGrow, match=reason):
        grow(source, tmp_path / "out", shape)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_filler_depends_on_the_seed_alone(tmp_path):
    shape = replace(DRAFT, num_hidden_layers=3)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        grow(DEMO / "draft", tmp_path / name, shape, seed=seed)
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    name = "model.layers.2.mlp.down_proj.weight"
    assert not torch.equal(a[name], c[name])
    other = a["model.layers.2.mlp.gate_proj.weight"]
    assert not torch.equal(a[name].flatten(), other.flatten()), "each tensor has its own"


def test_the_cache_writes_each_checkpoint_once(tmp_path):
    shape = replace(DRAFT, num_hidden_layers=3)
    first = cached(DEMO / "draft", shape, "bfloat16", tmp_path)
    written_ns = (first / INDEX).stat().st_mtime_ns
    assert cached(DEMO / "draft", shape, "bfloat16", tmp_path) == first
    assert (first / INDEX).stat().st_mtime_ns == written_ns
    others = {
        cached(DEMO / "draft", shape, "float32", tmp_path),
        cached(DEMO / "draft", shape, "bfloat16", tmp_path, seed=1),
        cached(DEMO / "draft", replace(shape, num_hidden_layers=4), "bfloat16", tmp_path),
        cached(other_source(tmp_path / "other" / "draft"), shape, "bfloat16", tmp_path),
    }
    assert len(others | {first}) == 5
    assert not list(tmp_path.glob(".*")), "no unfinished ones are left"


def other_source(path: Path) -> Path:
    """The same weights with another tokenizer file, which is another checkpoint."""
    path.mkdir(parents=True)
    for file in (DEMO / "draft").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "tokenizer_config.json").write_text("{}")
    return path
