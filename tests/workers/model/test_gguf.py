"""A GGUF file becomes a checkpoint with the weights, settings and tokenizer that the file states, or is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, StartupError, UnsupportedModel
from deploy.cli import main
from orchestrator.text import Tokenizer
from tests import checkpoints
from workers.model import check_checkpoint, load
from workers.model.gguf import _names, convert_gguf

gguf = pytest.importorskip("gguf", reason="needs the optional package gguf")
F32, Q = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType
SIZES = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "tie_word_embeddings": False}
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
GEMMA = {
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 20.0,
    "layer_types": None,
    "sliding_window_pattern": 6,
}
LAYOUT = {"gemma2": GEMMA, "gemma3_text": GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}}
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its scales in float16."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp stores queries and keys of a Llama. Source: llama.cpp, convert_hf_to_gguf.py, `permute`."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def stored(family: str, name: str, weights: np.ndarray) -> np.ndarray:
    if family == "llama" and ".attn_q." in name:
        return permuted(weights, 4)
    if family == "llama" and ".attn_k." in name:
        return permuted(weights, 2)
    return weights + 1 if "gemma" in family and "norm.weight" in name else weights


def packed(weights: np.ndarray, kind: Any) -> np.ndarray:
    """Blocks of a type; random ones with scales of 0.01 for types that gguf only reads."""
    if kind.name not in SCALES:
        return weights.astype(np.int8) if kind == Q.I8 else gguf.quantize(weights, kind)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (len(weights), block_bytes), np.uint8)
    for begin in SCALES[kind.name]:
        blocks[:, begin : begin + 2] = np.array([0.01], np.float16).view(np.uint8)
    return blocks


def write(
    file: Path,
    family: str = "llama",
    kind: Any = F32,
    change: Callable[[dict[str, np.ndarray]], Any] = lambda _: None,
    settings: dict[str, Any] | None = None,
    pre: str = "gpt-2",
    **sizes: Any,
) -> Any:
    """Write a tiny model as a GGUF file; returns the model."""
    model = checkpoints.build(family, **SIZES | LAYOUT.get(family, {}) | sizes)
    config, arch = model.config, FAMILIES.get(family, family)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if family != "qwen2":
        writer.add_key_length(16)
        writer.add_value_length(16)
    if family == "llama":
        writer.add_rope_dimension_count(16)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if "gemma" in family:
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for key, value in (settings or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer, pre)
    sources = {own: name for name, own in _names(model, arch).items()}
    tensors = {
        sources[name]: stored(family, sources[name], value.numpy().copy())
        for name, value in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    change(tensors)
    for name, value in tensors.items():
        is_packed = kind != F32 and name.endswith("ffn_down.weight")
        data = packed(value, kind) if is_packed else value.astype(np.float32)
        writer.add_tensor(name, data, raw_dtype=kind if is_packed else F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_tokenizer(writer: Any, pre: str) -> None:
    described = json.loads(checkpoints.tokenizer_json())
    tokens = [*described["model"]["vocab"], "<|end|>"]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), checkpoints.VOCAB_SIZE + 4)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|end|>" else 5 if token.startswith("[PAD") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_bos_token_id(checkpoints.EOS)
    writer.add_eos_token_id(checkpoints.EOS)
    writer.add_eot_token_id(7)
    writer.add_chat_template(TEMPLATE)


def converted(file: Path, dtype: str = "float32") -> Path:
    out = file.parent / "out"
    convert_gguf(file, out, dtype, lambda _: None)
    check_checkpoint(EngineConfig(str(out), dtype=dtype))
    return out


def refusal(file: Path, kind: type[StartupError]) -> str:
    with pytest.raises(kind) as caught:
        converted(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    return str(caught.value)


def rope_of(family: str, more: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 30_000.0} | more
    own = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": rope}
    return {"rope_parameters": own if family == "gemma3_text" else rope}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_family_computes_as_before(family: str, is_scaled: bool, tmp_path: Path) -> None:
    original = write(
        tmp_path / "m.gguf", family, **rope_of(family, {"rope_type": "linear", "factor": 4.0} if is_scaled else {})
    )
    ids = torch.arange(40)[None]
    read = AutoModelForCausalLM.from_pretrained(converted(tmp_path / "m.gguf"), attn_implementation="eager").eval()
    with torch.inference_mode():
        torch.testing.assert_close(read(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_what_gguf_dequantizes(kind: str, dtype: str, tmp_path: Path) -> None:
    kept = {}
    write(tmp_path / "m.gguf", "qwen3", kind=Q[kind], change=kept.update)
    out = converted(tmp_path / "m.gguf", dtype)
    weights = load(EngineConfig(str(out), dtype=dtype), lambda _: None).model.state_dict()
    whole = gguf.dequantize(packed(kept["blk.1.ffn_down.weight"], Q[kind]), Q[kind])
    found = weights["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(found, torch.from_numpy(whole).to(getattr(torch, dtype)))
    assert found.std() > 0


def test_the_frequencies_of_llama_3_become_its_parameters(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    sizes = SIZES | {"max_position_embeddings": 16_384}
    scaled = checkpoints.build("llama", **sizes, rope_parameters=rope).model.rotary_emb.inv_freq
    factors = (10_000.0 ** -(torch.arange(0, 16, 2) / 16) / scaled).numpy()
    changed = {"max_position_embeddings": 16_384}
    write(tmp_path / "m.gguf", change=lambda tensors: tensors.update({"rope_freqs.weight": factors}), **changed)
    model = load(EngineConfig(str(converted(tmp_path / "m.gguf"))), lambda _: None).model
    assert torch.equal(model.model.rotary_emb.inv_freq, scaled)


def test_tokens_template_and_ends_are_those_of_the_file(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", settings={"tokenizer.ggml.add_bos_token": True})
    out = converted(tmp_path / "m.gguf")
    ours = Tokenizer.from_directory(out)
    (tmp_path / "tokenizer.json").write_text(checkpoints.tokenizer_json())
    plain = Tokenizer.from_directory(tmp_path)
    for text in ("the  tea, 1024 times", "hé\n\n  x<|end|>y"):
        assert ours.encode(text, add_special_tokens=False) == plain.encode(text)
        assert ours.encode(text) == (checkpoints.EOS, *plain.encode(text))
    assert ours.template == TEMPLATE
    assert load(EngineConfig(str(out)), lambda _: None).info.eos_token_ids == (checkpoints.EOS, 7)


def test_digits_are_split_where_the_file_says_so(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", pre="smollm")
    ours = Tokenizer.from_directory(converted(tmp_path / "m.gguf"))
    pieces = ours._backend.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


@pytest.mark.parametrize("damage", [cut, cut_in_the_header, lambda file: file.write_bytes(b""), Path.unlink])
def test_a_damaged_file_is_refused(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    damage(tmp_path / "m.gguf")
    assert "is no GGUF file, or is damaged or incomplete" in refusal(tmp_path / "m.gguf", CheckpointError)


REFUSED: dict[str, tuple[dict[str, Any], type[StartupError], str]] = {
    "a tensor too few": ({"change": lambda t: t.pop("blk.1.ffn_up.weight")}, CheckpointError, "lacks 1 tensors"),
    "no output": ({"family": "qwen2", "change": lambda t: t.pop("output_norm.weight")}, CheckpointError, "output_norm"),
    "a tensor too many": (
        {"change": lambda t: t.update({"blk.0.attn_q.bias": np.zeros(64, np.float32)})},
        CheckpointError,
        "has no place in the model for 1 tensors, the first is blk.0.attn_q.bias",
    ),
    "another shape": (
        {"change": lambda t: t.update({"blk.0.ffn_up.weight": np.zeros((8, 64), np.float32)})},
        CheckpointError,
        "is (8, 64), but its configuration says (256, 64)",
    ),
    "unlike frequencies": (
        {"change": lambda t: t.update({"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)})},
        UnsupportedModel,
        "scales rotary frequencies",
    ),
    "a scaling": ({"settings": {"llama.rope.scaling.type": "yarn"}}, UnsupportedModel, "rope.scaling.type = yarn"),
    "experts": ({"settings": {"llama.expert_count": 8}}, UnsupportedModel, "states expert_count = 8"),
    "another width of keys": (
        {"family": "qwen2", "settings": {"qwen2.attention.key_length": 32}},
        UnsupportedModel,
        "states attention.key_length = 32, where transformers has 16",
    ),
    "a part": ({"settings": {"split.count": 3}}, CheckpointError, "is one of 3 parts"),
    "a part without a number": ({"settings": {"split.count": "x"}}, CheckpointError, "is one of x parts"),
    "more layers than tensors": (
        {"change": lambda t: [t.pop(name) for name in list(t) if name != "token_embd.weight"]},
        CheckpointError,
        "states block_count = 2, but has 1 tensors",
    ),
    "an adapter": ({"settings": {"general.type": "adapter"}}, CheckpointError, "is of type 'adapter'"),
    "an unknown split": ({"pre": "novel"}, UnsupportedModel, "splits text by the rule 'novel'"),
}


@pytest.mark.parametrize(("given", "kind", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_left_out_is_refused(given: dict[str, Any], kind: type, problem: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", **given)
    assert problem in refusal(tmp_path / "m.gguf", kind)


def test_integers_and_unknown_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "is of architecture 'rwkv6'; gemma2," in refusal(tmp_path / "m.gguf", UnsupportedModel)
    write(tmp_path / "m.gguf", kind=Q.I8)
    assert "has weights that cannot be dequantized" in refusal(tmp_path / "m.gguf", UnsupportedModel)


def test_the_command_writes_a_checkpoint_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "m.gguf", tmp_path / "made"
    write(file, kind=Q.Q8_0)
    assert main.main(("serve", "--target", str(file))) == 2
    assert f"convert it first: outrider convert {file} DIR" in capsys.readouterr().err
    assert main.main(("convert", str(file), str(out))) == 0
    said = capsys.readouterr()
    assert f"{file} has 1 MB of weights; they are dequantized to bfloat16" in said.err
    assert f"outrider serve --target {out} --dtype bfloat16" in said.out
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "all files are readable by whoever may read one"
    assert main.main(("check", "--target", str(out), "--draft", str(out))) == 0
    assert main.main(("convert", str(file), str(out))) == 2
    cut(file)
    assert main.main(("convert", str(file), str(tmp_path / "other"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "made"]


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[gguf\]'"):
        converted(tmp_path / "m.gguf")
