"""An export that was made from another model is no peer."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.models.sizes import read_shape
from bench.peers.openvino import exported
from core.errors import StartupError
from deploy.settings import DEMO_DIRECTORY


def test_an_export_of_another_shape_is_refused(tmp_path: Path) -> None:
    source = DEMO_DIRECTORY / "target"
    shape = read_shape(source)
    for name, each in (("other", replace(shape, num_hidden_layers=shape.num_hidden_layers - 1)), ("same", shape)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "openvino_model.bin").touch()
        (tmp_path / name / "config.json").write_text(json.dumps(asdict(each)))
    with pytest.raises(StartupError, match="has another shape than"):
        exported(Path("python"), source, tmp_path / "other")
    assert exported(Path("python"), source, tmp_path / "same") == tmp_path / "same"
