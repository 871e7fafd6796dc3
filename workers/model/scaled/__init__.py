"""Quantized weights: each becomes a float tensor when it is read, whole or in part. Must not know models.

A weight is stored as several tensors: values, scales and what else its layout has. `read_scheme` finds the layouts that
a config.json declares, `as_read` checks the tensors of each weight by their headers, and `views` gives one view of each
weight, whose parts are read as floats. Activations are not quantized: outputs are those of the dequantized weights.
"""

from workers.model.scaled.declared import DECLARED, MODELOPT, read_scheme
from workers.model.scaled.weights import ScaledView, ScaledWeights, StoredTensor, as_read, views, zero_biases

__all__ = [
    "DECLARED",
    "MODELOPT",
    "ScaledView",
    "ScaledWeights",
    "StoredTensor",
    "as_read",
    "read_scheme",
    "views",
    "zero_biases",
]
