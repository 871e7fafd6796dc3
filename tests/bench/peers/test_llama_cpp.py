"""The file that llama.cpp gets has the weights of the source, in bfloat16, and everything else as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import llama_cpp


def test_a_dequantized_file_has_the_weights_and_settings_of_its_source(tmp_path: Path) -> None:
    import gguf

    numbers = np.random.default_rng(1).standard_normal((4, 64), np.float32)
    q8 = gguf.GGMLQuantizationType.Q8_0
    writer: Any = gguf.GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(numbers, q8), raw_dtype=q8)
    writer.add_tensor("output_norm.weight", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    target = llama_cpp.dequantized(tmp_path / "source.gguf", tmp_path / "target.gguf")
    reader: Any = gguf.GGUFReader(target)
    matrix, norm = reader.tensors
    assert (matrix.tensor_type, norm.tensor_type) == (gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32)
    want = gguf.dequantize(gguf.quantize(numbers, q8), q8)
    assert np.abs(gguf.dequantize(matrix.data, matrix.tensor_type) - want).max() <= np.abs(want).max() / 256
    assert np.array_equal(norm.data, numbers[0])
    assert reader.fields["llama.block_count"].contents() == 2
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert not (tmp_path / "target.part").exists()
