"""The head in models/smollm2 is whole, and of SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

import torch

from workers.heads import read_head
from workers.heads.eagle_files import load_tensors

FOLDER = Path(__file__).parents[2] / "models" / "smollm2"


def test_its_files_are_read_by_the_server(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    config = read_head(str(FOLDER), str(tmp_path))
    config.check_target(hidden_size=576, vocab_size=49152)
    assert config.feature_layers == (2, 15, 27)
    tensors = load_tensors(config, str(FOLDER), torch.bfloat16, torch.device("cpu"))
    assert len(tensors["d2t"]) == 8192
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 16 << 20
