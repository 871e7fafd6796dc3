"""A GGUF file becomes a checkpoint with the weights, settings and tokenizer that the file states, or is refused."""

from __future__ import annotations

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
from tests.workers.model.conversion.gguf_files import FAMILIES, NEW, SIZES, TEMPLATE, Q, gguf, packed, write
from workers.model import check_checkpoint, load
from workers.model.conversion import gguf_config
from workers.model.conversion.gguf import convert_gguf


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
    if family == "minimax_m2":
        rope["partial_rotary_factor"] = 0.5
    own = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": rope}
    return {"rope_parameters": own if family == "gemma3_text" else rope}


@pytest.mark.parametrize(
    ("family", "is_scaled"),
    [(family, False) for family in FAMILIES if family not in NEW]
    + [(family, True) for family in FAMILIES if family not in ("gpt2", "phi3", *NEW)],
)
def test_a_family_computes_as_before(family: str, is_scaled: bool, tmp_path: Path) -> None:
    original = write(
        tmp_path / "m.gguf", family, **rope_of(family, {"rope_type": "linear", "factor": 4.0} if is_scaled else {})
    )
    ids = torch.arange(40)[None]
    read = AutoModelForCausalLM.from_pretrained(converted(tmp_path / "m.gguf"), attn_implementation="eager").eval()
    with torch.inference_mode():
        torch.testing.assert_close(read(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", NEW)
def test_recurrent_families_compute_as_before(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_config, "check_architecture", lambda _: None)
    rope = {"rope_type": "default", "rope_theta": 30_000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    sizes = {"rope_parameters": rope | {"mrope_interleaved": True}} if family != "lfm2" else {}
    original = write(tmp_path / "m.gguf", family, **sizes)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32", lambda _: None)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert read.config.layer_types == original.config.layer_types
    found, expected = read.state_dict(), original.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(read(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if dtype == "bfloat16" or kind == "Q4_K" else pytest.mark.slow)
        for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
        for dtype in ("float32", "bfloat16")
    ],
)
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


def test_the_factors_of_phi_become_its_parameters(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 30_000.0, "partial_rotary_factor": 0.75}
    rope |= {"short_factor": [1.5] * 6, "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "attention_factor": 1.25}
    sizes = {"max_position_embeddings": 512, "original_max_position_embeddings": 32, "rope_parameters": rope}
    rope["original_max_position_embeddings"] = 32

    def change(tensors: dict[str, np.ndarray]) -> None:
        for kind in ("short", "long"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)

    stated = {"rope.dimension_count": 12, "rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    settings = {f"phi3.{key}": value for key, value in stated.items()}
    original = write(tmp_path / "m.gguf", "phi3", change=change, settings=settings, **sizes)
    out = converted(tmp_path / "m.gguf")
    read = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    for length in (20, 60):  # below the original context and above it
        ids = torch.arange(length)[None]
        with torch.inference_mode():
            torch.testing.assert_close(read(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
    assert load(EngineConfig(str(out)), lambda _: None).info.max_context_tokens == 32
    write(
        tmp_path / "m.gguf", "phi3", change=lambda t: [change(t), t.pop("rope_factors_long.weight")], settings=settings
    )
    assert "lacks rope_factors_long.weight" in refusal(tmp_path / "m.gguf", CheckpointError)


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
    "a value that is NaN": (
        {"change": lambda t: t["blk.0.ffn_up.weight"].fill(np.nan)},
        CheckpointError,
        "m.gguf has a value that is NaN or infinite",
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
