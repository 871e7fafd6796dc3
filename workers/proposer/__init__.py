"""Proposes candidates for the nodes of a draft tree: by the draft model, alone or with a lookup that guesses ahead.

Knows logits, tokens and candidates; must not know trees, KV, sessions or time.
"""

from workers.proposer.cascade import Cascade
from workers.proposer.proposer import ModelProposer, Proposer
from workers.proposer.text_index import TextIndex

__all__ = ["Cascade", "ModelProposer", "Proposer", "TextIndex"]
