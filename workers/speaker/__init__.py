"""Who says what may follow the nodes of a draft tree: the draft model, alone or behind a lookup that guesses ahead.

Knows logits, tokens and candidates; must not know trees, KV, sessions or time.
"""

from workers.speaker.cascade import Cascade
from workers.speaker.speaker import ModelSpeaker, Speaker
from workers.speaker.text_index import TextIndex

__all__ = ["Cascade", "ModelSpeaker", "Speaker", "TextIndex"]
