"""Language models inside of checkpoints: text towers, attention that is full up to some length, some of the layers, and
MTP layers.
"""

from workers.model.contained.language_model import TOWERS, Contained, Rename, language_model, tower_name
from workers.model.contained.layers import LayerSubset, layer_list
from workers.model.contained.mtp import JOINING, MTP_KINDS, MtpKind, MtpLayer, find_mtp, has_mtp, without_mtp

__all__ = [
    "JOINING",
    "MTP_KINDS",
    "TOWERS",
    "Contained",
    "LayerSubset",
    "MtpKind",
    "MtpLayer",
    "Rename",
    "find_mtp",
    "has_mtp",
    "language_model",
    "layer_list",
    "tower_name",
    "without_mtp",
]
