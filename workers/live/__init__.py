"""Learning from live traffic (online speculative decoding): a target keeps the places where guesses were wrong, and a
process of its own trains the draft on them.

Source: Liu et al. 2023, arXiv:2310.07177. Nothing here can change a verdict.
"""

from workers.live.buffer import KeptText, LearningBuffer, check_buffer, files_after, read_kept
from workers.live.collector import VerdictCollector, VerdictEnd
from workers.live.learner import Learner, LearningPlan, agreement, load_draft, without_hits
from workers.live.rounds import LearningRounds, RoundTerms
from workers.live.versions import Versions

__all__ = [
    "KeptText",
    "Learner",
    "LearningBuffer",
    "LearningPlan",
    "LearningRounds",
    "RoundTerms",
    "VerdictCollector",
    "VerdictEnd",
    "Versions",
    "agreement",
    "check_buffer",
    "files_after",
    "load_draft",
    "read_kept",
    "without_hits",
]
