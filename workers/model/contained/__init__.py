"""Language models inside of checkpoints: text towers, and attention that is full up to some length."""

from workers.model.contained.language_model import TOWERS, Contained, Rename, language_model, tower_name

__all__ = ["TOWERS", "Contained", "Rename", "language_model", "tower_name"]
