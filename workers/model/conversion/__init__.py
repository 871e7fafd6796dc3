"""Writes checkpoints with float weights from GGUF files and quantized checkpoints, for `outrider convert`."""

from workers.model.conversion.dequantized import write_dequantized
from workers.model.conversion.gguf import convert_gguf

__all__ = ["convert_gguf", "write_dequantized"]
