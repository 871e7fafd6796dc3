"""Pilots that decide by dice: trees and tables of any shape, blocks cut anywhere, drafts that rest or come too late.

No rule that a pilot may follow can change the output, so dice stand for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from core.config import SpeculationConfig
from core.records import GenerationRequest, Verification
from core.trees import NO_GROWTH, ROOT, Growth
from orchestrator.pilot import ControlReport, RoundSeen, Shape

MAX_NODES = 24
PATIENT = SpeculationConfig(draft_retry_s=0.01, breaker_rounds=10**6)
"""No breaker: dice are often impatient, and a draft that is given back guesses nothing."""


def random_growth(random: Random, tops: list[int], first: int, num_nodes: int, depth: int, *, is_chain: bool) -> Growth:
    """Up to `num_nodes` nodes, each below one of `tops` or an earlier one; chains have one child of rank 0 each."""
    parents: list[int] = []
    ranks: list[int] = []
    room = dict.fromkeys(tops, depth)
    taken: dict[int, set[int]] = {}
    for _ in range(num_nodes):
        parent = random.choice([node for node, left in room.items() if left > 0] or [None])
        if parent is None:
            break
        rank = 0 if is_chain else random.choice((0, 0, 0, 1, 2, 5))
        if rank in taken.setdefault(parent, set()):
            continue
        taken[parent].add(rank)
        room[first + len(parents)] = room[parent] - 1
        parents.append(parent)
        ranks.append(rank)
        if is_chain:
            del room[parent]
    return Growth(tuple(parents), tuple(ranks))


@dataclass
class WildPilot:
    """One session's dice."""

    random: Random
    is_chain: bool
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
        num_nodes = self.random.randrange(MAX_NODES)
        return random_growth(self.random, [ROOT], 0, num_nodes, depth, is_chain=self.is_chain)

    def table(self, shape: Shape, max_depth: int) -> Growth:
        """Outcomes at places of the block, and something of any shape below each."""
        depth = min(max_depth, self.max_depth)
        if depth < 1 or self.random.random() < 0.1:
            return NO_GROWTH
        places = [place for place in range(ROOT, len(shape)) if self.random.random() < 0.8]
        outcomes = [(place, rank) for place in places for rank in range(self.random.randrange(4))]
        tops = [len(shape) + index for index in range(len(outcomes))]
        first = len(shape) + len(outcomes)
        below = random_growth(self.random, tops, first, 2 * MAX_NODES, depth, is_chain=self.is_chain)
        return Growth(
            (*(place for place, _ in outcomes), *below.parents), (*(rank for _, rank in outcomes), *below.ranks)
        )

    def num_to_verify(self, shape: Shape) -> int:
        """Where q counts this is asked guess by guess, and a rule may look at all that it is shown."""
        return len(shape) if self.random.random() < 0.8 else self.random.randrange(len(shape) + 1)

    def num_to_look_up(self, max_depth: int) -> int:
        return min(max_depth, self.random.randrange(4))

    def saw_round(self, seen: RoundSeen) -> None:
        self.rounds.append(seen)

    def saw_draft(self, seen: object) -> None: ...

    def saw_late_draft(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class WildPilots:
    """Dice for every session, all from one seed."""

    seed: int
    max_depth: int = 6
    pilots: list[WildPilot] = field(default_factory=list)

    def pilot(self, request: GenerationRequest) -> WildPilot:
        is_coupled = request.verification is Verification.COUPLED or request.sampling.is_greedy
        depth = self.max_depth if request.max_draft_tokens is None else request.max_draft_tokens
        self.pilots.append(WildPilot(Random(f"{self.seed} {len(self.pilots)}"), not is_coupled, depth))
        return self.pilots[-1]

    def report(self) -> ControlReport:
        return ControlReport("wild", len(self.pilots), 0, 0, 0, "dice", (), 0.0)
