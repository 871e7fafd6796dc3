"""A quantized checkpoint becomes one with floats that computes the same, or nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from deploy.cli import main
from tests import checkpoints
from tests.quantized import write
from workers.model import load, reference_model
from workers.model.conversion import dequantized


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["DeepSeek", "GPTQ"])
def test_a_folder_becomes_the_same_model(
    kind: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantized, "MAX_FILE_BYTES", 1 << 14)
    scaled, out = write(kind, tmp_path)[0], tmp_path / "out"
    stored = load_file(scaled / "model.safetensors")
    if kind == "GPTQ":
        stored["model.layers.0.mlp.up_proj.bias"] = torch.zeros(64)
    save_file(stored, scaled / "model.safetensors", metadata={"format": "pt"})
    assert main.main(("convert", str(scaled), str(out), "--dtype", dtype)) == 0
    assert f"{'FP8' if kind == 'DeepSeek' else 'GPTQ int4'} weights of {scaled} are" in capsys.readouterr().err
    assert len(list(out.glob("*.safetensors"))) > 2
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "all files are readable by whoever may read one"
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    found, expected = (load(EngineConfig(str(path), dtype=dtype), lambda _: None).model for path in (out, scaled))
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())
    assert (out / "tokenizer.json").read_text() == (scaled / "tokenizer.json").read_text()
    assert reference_model(EngineConfig(str(out))).generation_config.eos_token_id == checkpoints.EOS


def test_what_cannot_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = checkpoints.write("llama", tmp_path / "plain"), str(tmp_path / "out")
    assert main.main(("convert", str(plain), out)) == 2
    assert "declares no quantized weights; serve the directory as it is" in capsys.readouterr().err
    assert main.main(("convert", str(tmp_path / "none"), out)) == 2
    assert "there is no file or directory" in capsys.readouterr().err
    scaled, _ = write("AWQ", tmp_path / "awq")
    stored = load_file(scaled / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.scales"]
    save_file(stored, scaled / "model.safetensors", metadata={"format": "pt"})
    assert main.main(("convert", str(scaled), out)) == 2
    assert "has no model.layers.0.mlp.up_proj.scales, which AWQ int4 needs" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["awq", "plain"]
