"""A checkpoint's digest is that of its numbers: not of how they are spread over files, and of no fewer than it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from workers.model.digest import SAMPLE_BYTES, SAMPLED, WHOLE, digest

CONFIG = {"hidden_size": 4, "rope_theta": 1e4}
NUM = 4 * SAMPLE_BYTES
"""Elements, of four bytes: sixteen blocks, of which three are samples."""


def tensors():
    random = np.random.default_rng(0)
    return {"b": random.random(NUM, dtype=np.float32), "a": random.random((2, 3), dtype=np.float32)}


@pytest.fixture
def digest_of(tmp_path):
    def of(*files, whole_bytes=2**30, config=CONFIG):
        (tmp_path / "config.json").write_text(json.dumps(config))
        paths = []
        for index, content in enumerate(files):
            paths.append(tmp_path / f"{index}.safetensors")
            save_file(content, paths[-1], {"format": "pt"})
        return digest(tmp_path / "config.json", paths, whole_bytes)

    return of


def test_files_do_not_matter_and_every_byte_does(digest_of):
    whole = tensors()
    expected = digest_of(whole)
    assert expected.startswith(f"{WHOLE}:")
    assert digest_of({"a": whole["a"]}, {"b": whole["b"]}) == expected
    assert digest_of(whole, config=dict(reversed(CONFIG.items()))) == expected, "the order of settings is none"
    whole["b"][NUM // 3] += 1
    assert digest_of(whole) != expected


@pytest.mark.parametrize("at", [0, NUM // 2, NUM - 1])
def test_samples_are_named_so_and_see_three_blocks_of_each_tensor(digest_of, at):
    whole = tensors()
    expected = digest_of(whole, whole_bytes=100)
    assert expected.startswith(f"{SAMPLED}:")
    whole["b"][at] += 1
    assert digest_of(whole, whole_bytes=100) != expected


def test_samples_do_not_see_what_is_between_them(digest_of):
    whole = tensors()
    expected = digest_of(whole, whole_bytes=100)
    whole["b"][NUM // 4] += 1
    assert digest_of(whole, whole_bytes=100) == expected


@pytest.mark.parametrize("whole_bytes", [100, 2**30])
def test_names_shapes_types_and_settings_are_part_of_it(digest_of, whole_bytes):
    whole = tensors()
    others = [
        digest_of({"b": whole["b"], "c": whole["a"]}, whole_bytes=whole_bytes),
        digest_of({**whole, "a": whole["a"].reshape(3, 2)}, whole_bytes=whole_bytes),
        digest_of({**whole, "a": whole["a"].view(np.int32)}, whole_bytes=whole_bytes),
        digest_of(whole, whole_bytes=whole_bytes, config={**CONFIG, "rope_theta": 1e6}),
        digest_of(whole, whole_bytes=whole_bytes),
    ]
    assert len(set(others)) == len(others)


def test_a_file_that_ends_early_has_no_digest(digest_of, tmp_path):
    digest_of(tensors())
    file = tmp_path / "0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="shorter than its header says"):
        digest(tmp_path / "config.json", [file], 2**30)
