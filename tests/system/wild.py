"""Pilots that decide by dice: blocks of any shape, cut anywhere, drafts that rest or come too late.

No rule that a pilot may follow can change the output, so dice stand for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from core.config import SpeculationConfig
from core.records import GenerationRequest, Verification
from core.trees import NO_GROWTH, ROOT, Growth, Measure, Steady
from orchestrator.knowledge import Knowledge
from orchestrator.pilot import ControlReport, RoundSeen, Shape
from orchestrator.tree_pilot import TreePilot

MAX_NODES = 24
PATIENT = SpeculationConfig(draft_retry_s=0.01, breaker_rounds=10**6)
"""No breaker: dice are often impatient, and a draft that is given back guesses nothing."""


def random_chains(random: Random, tops: list[int], first: int, num_nodes: int, depth: int) -> Growth:
    """Up to `num_nodes` samples in chains below `tops`."""
    parents: list[int] = []
    room = dict.fromkeys(tops, depth)
    for _ in range(num_nodes):
        parent = random.choice([node for node, left in room.items() if left > 0] or [None])
        if parent is None:
            break
        room[first + len(parents)] = room.pop(parent) - 1
        parents.append(parent)
    return Growth(tuple(parents), (0,) * len(parents))


@dataclass
class WildAskedPilot:
    """The dice of a session whose draft samples."""

    random: Random
    max_depth: int
    rounds: list[RoundSeen] = field(default_factory=list)

    @property
    def wants_draft(self) -> bool:
        return self.max_depth > 0 and self.random.random() < 0.95

    @property
    def patience_s(self) -> float:
        return self.random.choice((0.0, 0.003, *[5.0] * 20))

    def block(self, max_depth: int) -> Growth:
        depth = min(max_depth, self.max_depth)
        return random_chains(self.random, [ROOT], 0, self.random.randrange(MAX_NODES), depth)

    def table(self, shape: Shape, max_depth: int) -> Growth:
        """Outcomes at places of the block, and chains of any length below each."""
        depth = min(max_depth, self.max_depth)
        if depth < 1 or self.random.random() < 0.1:
            return NO_GROWTH
        places = [place for place in range(ROOT, len(shape)) if self.random.random() < 0.8]
        outcomes = [(place, rank) for place in places for rank in range(self.random.randrange(4))]
        tops = [len(shape) + index for index in range(len(outcomes))]
        below = random_chains(self.random, tops, len(shape) + len(outcomes), 2 * MAX_NODES, depth)
        return Growth(
            (*(place for place, _ in outcomes), *below.parents), (*(rank for _, rank in outcomes), *below.ranks)
        )

    def num_to_verify(self, shape: Shape) -> int:
        """This is asked guess by guess, and a rule may look at all that it is shown."""
        return len(shape) if self.random.random() < 0.8 else self.random.randrange(len(shape) + 1)

    def num_to_look_up(self, max_depth: int) -> int:
        return min(max_depth, self.random.randrange(4))

    def saw_round(self, seen: RoundSeen) -> None:
        self.rounds.append(seen)

    def saw_draft(self, seen: object) -> None: ...

    def saw_late_draft(self) -> None: ...

    def close(self) -> None: ...


class WildTreePilot(TreePilot):
    """The dice of a session whose draft grows a tree."""

    measure = Measure.LEAD

    def __init__(self, random: Random, request: GenerationRequest, config: SpeculationConfig, known: Knowledge) -> None:
        super().__init__(request, config, known)
        self.random = random
        self.rounds: list[RoundSeen] = []

    @property
    def patience_s(self) -> float:
        return self.random.choice((0.0, 0.003, *[5.0] * 20))

    def wants_turn(self) -> bool:
        return self.random.random() < 0.9

    def _going_on(self, depth: int) -> Steady:
        return Steady(self.random.randrange(1, 9), depth, sureness=self._sureness, tail=self._usual_tail)

    def _in_turn(self, depth: int) -> Steady:
        num_passes = self.random.randrange(1, 6)
        return Steady(self.random.randrange(1, 9), depth, tail=self._usual_tail, num_passes=num_passes)

    def choose(self, tree, max_nodes, max_depth):
        """Any of those that have grown, each with all above it."""
        chosen: list[int] = []
        for node in tree.best(len(tree), min(max_depth, self.max_depth)).tolist():
            is_fitting = tree.parents[node] in (ROOT, *chosen) and len(chosen) < min(max_nodes, MAX_NODES)
            if is_fitting and self.random.random() < 0.8:
                chosen.append(node)
        return np.array(chosen, np.int64)

    def is_worth_waiting(self, *_: object) -> bool:
        return self.random.random() < 0.5

    @property
    def wants_rest(self) -> bool:
        return self.random.random() < 0.02

    def rest(self) -> float:
        return 0.01

    def saw_round(self, seen: RoundSeen) -> None:
        super().saw_round(seen)
        self.rounds.append(seen)


@dataclass
class WildPilots:
    """Dice for every session, all from one seed."""

    seed: int
    max_depth: int = 6
    pilots: list[WildAskedPilot | WildTreePilot] = field(default_factory=list)
    known: Knowledge = field(default_factory=lambda: Knowledge(6, 1.0, 1.0))

    def pilot(self, request: GenerationRequest) -> WildAskedPilot | WildTreePilot:
        depth = self.max_depth if request.max_draft_tokens is None else request.max_draft_tokens
        random = Random(f"{self.seed} {len(self.pilots)}")
        if request.verification is Verification.COUPLED or request.sampling.is_greedy:
            config = SpeculationConfig(max_draft_tokens=depth, pipelining=random.random() < 0.7)
            self.pilots.append(WildTreePilot(random, request, config, self.known))
        else:
            self.pilots.append(WildAskedPilot(random, depth))
        return self.pilots[-1]

    def report(self) -> ControlReport:
        return ControlReport("wild", len(self.pilots), 0, 0, 0, "dice", (), 0.0)
