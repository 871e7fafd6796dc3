"""The draft tree of a session: the draft's half, which grows it, and the orchestrator's, from which blocks are taken.

Knows tokens, chances and the order of work; must not know models, KV or time.
"""

from core.speculation.calibration import (
    DRAWN_TAIL,
    MAX_REPORTED,
    PRIOR,
    USUAL_TAIL,
    WITH_REPLACEMENT_TAIL,
    Average,
    Calibration,
    logit,
    miss_curve,
)
from core.speculation.candidates import MAX_RANKS, Candidates, HeldTree
from core.speculation.chances import fixed_shape
from core.speculation.growth import UNRANKED, Floats, Ints, Measure, NewNodes, TreeSpec
from core.speculation.guesser import (
    DRAFT,
    EXTRA_DRAFT,
    MAX_GUESSES,
    NO_GUESSES,
    BadGuesserInput,
    DeliveredGuesser,
    Guesser,
    Guesses,
    HistoryGuesser,
    QuestioningGuesser,
    SamplingGuesser,
    check_distribution,
)
from core.speculation.passes import add_candidates, feed_likeliest
from core.speculation.source_precision import SourcePrecision
from core.speculation.speculation_tree import DRAFT_TOKENS, SpeculationTree
from core.speculation.token_tree import (
    EMPTY_BLOCK,
    NO_Q,
    NO_TOKEN,
    ROOT,
    SparseDistribution,
    TokenTree,
    num_branches,
    subtree,
)
from core.speculation.tree_builder import TreeBuilder
from core.speculation.tree_nodes import EMPTY_PART, Part
