"""Drafting that never stops: what one session's steady growth adds to each pass of the draft engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from core.growth import Candidates
from core.records import DraftRequest, GrownTree, Sprouted, Timing
from core.speculation.grower import MAX_TOLD, Grower, Node
from core.trees import ROOT, Steady, TokenTree
from workers.candidates import Kind, Place
from workers.jobs import Job
from workers.sampling import Row
from workers.steps import StepRows


@dataclass(eq=False, slots=True)
class SteadyJob(Job[DraftRequest]):
    """A session that is grown for until its next message; one of the engine's jobs while it takes part in a pass.

    Where growth ends by itself it is a job like others, until its reply.
    """

    feeding: list[Node] = field(default_factory=list)
    """In the next pass."""
    _above: list[int] = field(default_factory=list)
    """Where the held tree has their parents, since the step that feeds them was packed."""
    _pass: tuple[float, int] | None = None
    """When the last step that it had a part in began, and how many rows that had; None once it was told of."""

    @property
    def steady(self) -> Steady:
        return self.request.growth

    @property
    def grower(self) -> Grower:
        return self.held.grower

    @property
    def ends(self) -> bool:
        """Whether growth ends by itself, and a round waits for it."""
        return self.steady.num_passes > 0

    @property
    def is_urgent(self) -> bool:
        """The root first: without it there is no guess."""
        return self.ends or bool(self.pending)

    @property
    def num_tree_rows(self) -> int:
        return len(self.feeding)

    @property
    def may_feed(self) -> bool:
        """Whether there may be a node worth a row."""
        best = None if self.pending else self.grower.best()
        return best is not None and best.reach >= self.steady.min_reach

    @property
    def has_lost_root(self) -> bool:
        """Whether what the model says after the text is to be computed again, because its guesses were forgotten."""
        return not self.pending and self.held.tree.root is None

    def took_part(self, started_s: float, num_rows: int) -> None:
        Job.took_part(self, started_s, num_rows)  # a class with slots has no super() without arguments
        self._pass = (started_s, num_rows)

    def put_back(self, max_reach: float = math.inf) -> None:
        """Do without the nodes below this chance, which wait for another pass."""
        kept = [node for node in self.feeding if node.reach >= max_reach]
        for node in self.feeding:
            if node.reach < max_reach:
                self.grower.put_back(node)
        self.feeding = kept

    def row_of(self, node: Node) -> int | None:
        """Where the held tree has it; `ROOT` for the root, None where it is not held."""
        path = node.path()
        rows = self.held.tree.walk(path)
        if len(rows) < len(path):
            return None
        return rows[-1] if rows else ROOT

    def last_rows(self) -> StepRows:
        """What is pending, or the nodes to be fed."""
        tree, known = self.held.tree, dict[int, int]()
        self._above = []
        for node in self.feeding:
            assert node.parent is not None, "the root is fed as a token"
            row = known.get(id(node.parent))
            if row is None:
                row = self.row_of(node.parent)
                assert row is not None, "a node is fed after its parent"
                known[id(node.parent)] = row
            self._above.append(row)
        tokens = (*tree.tokens, *(node.token for node in self.feeding))
        parents = (*tree.parents, *self._above)
        return StepRows(self.held.kv, self.pending, TokenTree(tokens, parents), len(tree))

    def places(self) -> list[Place]:
        """Of the logits that the last step gave."""
        spec, log = self.held.spec, self.held.log
        kind = Kind.of(spec.sampling, spec.verification)
        seen = spec.sampling.has_penalties
        return [
            Place(
                Row(
                    spec.sampling,
                    len(log) + node.depth,
                    [*log.tokens, *node.path()] if seen else (),
                    spec.prompt_len,
                ),
                kind,
                node.depth if spec.needs_q else None,
                num_ranks=MAX_TOLD + 1,  # chances are shared out among those that follow the first
            )
            for node in self._fed()
        ]

    def take(self, found: Sequence[Candidates]) -> None:
        """What the model says after each of `places`."""
        tree = self.held.tree
        if self.feeding:
            for node, above, candidates in zip(self.feeding, self._above, found, strict=True):
                tree.add(above, node.token, candidates)
        else:
            tree.root = found[0]
        self.grower.take(self._fed(), found)
        self.grower.made_pass()
        self.feeding = []

    def begin_again(self) -> None:
        self.pending = [*self.held.log.tokens, *self.pending]
        self.feeding = []
        self.held.tree.clear()
        self.grower.begin()
        self.grower.go_on(self.grower.steady)  # with all of its passes

    @property
    def is_done(self) -> bool:
        """Whether growth that ends by itself has ended."""
        return not self.pending and self.grower.has_ended

    def choose(self, room: int) -> None:
        """What growth that ends by itself feeds next, of which there is room for so many rows."""
        self.feeding = [] if self.pending else self.grower.next_pass(room)

    def sprouted(self, since_s: float | None = None) -> Sprouted:
        """What has grown since the last time.

        The pass took as long as from the one before, which ended at `since_s`: what is done between two passes, such as
        telling, is a part of what each costs. None where the engine had nothing to do before.
        """
        timing = None
        if self._pass is not None:
            started_s, num_rows = self._pass
            began_s = started_s if since_s is None else since_s
            timing, self._pass = Timing(0.0, monotonic() - began_s, 1, num_rows), None
        is_over = not self.pending and self.grower.best() is None
        return Sprouted(self.request.stamp, self.grower.tell(), self._num_held, timing, is_over)

    def reply(self) -> GrownTree:
        """All that has grown, where growth has ended."""
        timing = self.timing() if self.num_passes else None
        return GrownTree(self.request.stamp, self.grower.tell(), self._num_held, timing)

    @property
    def _num_held(self) -> int:
        return self.request.num_committed - len(self.pending)

    def _fed(self) -> list[Node]:
        return self.feeding or [self.grower.root]
