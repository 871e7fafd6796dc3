"""One completion as a state machine without I/O, and its parts."""

from orchestrator.session.beams import BeamSession, Pace
from orchestrator.session.pair import Pair
from orchestrator.session.session import Session
from orchestrator.session.statistics import DraftWait
