"""Continuous drafting: the part of one session in each pass of the draft engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from core.noise import row_of
from core.records import DraftDone, DraftRequest, DraftUpdate, Timing
from core.speculation import MAX_TOLD, Candidates, TokenTree, TreeBuilder, TreeSpec
from workers.engine.jobs import Job
from workers.grammar import Mask
from workers.sampling import Kind, Place, Row
from workers.step import StepRows


@dataclass(eq=False, slots=True)
class TreeJob(Job[DraftRequest]):
    """The growth of one session until its next message; one of the engine's jobs while it takes part in a pass.

    Where growth ends by itself it is a job like others, until its reply.
    """

    _pass: tuple[float, int] | None = None
    """Begin and number of rows of the last step that it took part in; None once it was told."""

    @property
    def tree_spec(self) -> TreeSpec:
        return self.request.growth

    @property
    def builder(self) -> TreeBuilder:
        return self.held.builder

    @property
    def ends(self) -> bool:
        """Whether growth ends by itself, and a round waits for it."""
        return self.tree_spec.ends

    @property
    def is_urgent(self) -> bool:
        """The root first: without it there is no guess."""
        return self.ends or bool(self.pending)

    @property
    def num_tree_rows(self) -> int:
        return len(self.builder.feeding)

    @property
    def may_feed(self) -> bool:
        """Whether there may be a node worth a row."""
        path_prob = 0.0 if self.pending else self.builder.best_path_prob
        return path_prob > 0.0 and path_prob >= self.tree_spec.min_path_prob

    @property
    def has_lost_root(self) -> bool:
        """Whether the candidates behind the text are to be computed again, because the guesses were dropped."""
        return not self.pending and self.held.tree.root is None

    def took_part(self, started_s: float, num_rows: int) -> None:
        Job.took_part(self, started_s, num_rows)  # a class with slots has no super() without arguments
        self._pass = (started_s, num_rows)

    def last_rows(self) -> StepRows:
        """The pending tokens, or the nodes to be fed."""
        tree, builder = self.held.tree, self.builder
        assert not builder.feeding or len(builder.rows) == 1 + len(tree), "the root and all that is held were fed"
        tokens = (*tree.tokens, *(builder.tokens[node] for node in builder.feeding))
        parents = (*tree.parents, *(builder.held_parent(node) for node in builder.feeding))
        return StepRows(self.held.kv, self.pending, TokenTree(tokens, parents), len(tree))

    def places(self) -> list[Place]:
        """The sampling context of each row of logits. Unless tokens are read or a grammar masks
        them, nodes of equal depth share it."""
        log, builder = self.held.log, self.builder
        nodes = builder.being_fed
        masks = self.held.masks(lambda: [builder.path(node) for node in nodes])
        if self.held.spec.sampling.reads_tokens or masks is not None:
            return [
                self._place(node, [*log.tokens, *builder.path(node)], mask)
                for node, mask in zip(nodes, masks or [None] * len(nodes), strict=True)
            ]
        if self.held.spec.needs_q:
            return [self._place(node) for node in nodes]
        at = {builder.depths[node]: node for node in nodes}
        alike = {depth: self._place(node) for depth, node in at.items()}
        return [alike[builder.depths[node]] for node in nodes]

    def _place(self, node: int, seen: Sequence[int] = (), mask: Mask | None = None) -> Place:
        spec, depth, num_draws = self.held.spec, self.builder.depths[node], self._num_draws
        row = Row(spec.sampling, len(self.held.log) + depth, seen, spec.prompt_len, mask)
        kind = Kind.of(spec.sampling, spec.verification)
        if not spec.needs_q:  # one candidate more than is told: the others share the rest of the probability
            return Place(row, kind, num_ranks=MAX_TOLD + 1)
        # In a chain the depth alone names a draw; in a tree the node does, too, and leaves room for its draws.
        sample = row_of(depth, node * num_draws if num_draws > 1 else 0)
        return Place(row, kind, sample, num_draws, spec.rule.draws_anew)

    @property
    def _num_draws(self) -> int:
        return self.tree_spec.fanout if self.tree_spec.ends else 1

    def hold(self, found: Sequence[Candidates]) -> None:
        """The model's candidates after each of `places`, which the tree builder still needs."""
        self.held.hold(found)
        self.builder.made_pass()

    def begin_again(self) -> None:
        self.pending = [*self.held.log.tokens, *self.pending]
        self.held.tree.clear()
        self.builder.begin()
        self.builder.go_on(self.builder.tree_spec)  # with all of its passes

    @property
    def is_done(self) -> bool:
        """Whether growth that ends by itself has ended."""
        return not self.pending and self.builder.has_ended

    def choose(self, room: int) -> None:
        """Choose the next nodes of growth that ends by itself, at most `room` of them."""
        if not self.pending:
            self.builder.feed_pass(room)

    def draft_update(self, since_s: float | None = None) -> DraftUpdate:
        """The nodes that have grown since the last update.

        A pass is timed from the end of the one before, `since_s`: work between two passes, such as telling, is a part
        of its cost. None where the engine was idle before.
        """
        timing = None
        if self._pass is not None:
            started_s, num_rows = self._pass
            began_s = started_s if since_s is None else since_s
            timing, self._pass = Timing(0.0, monotonic() - began_s, 1, num_rows), None
        is_over = not self.pending and self.builder.has_fed_all
        return DraftUpdate(self.request.stamp, self.builder.tell(), self._num_held, timing, is_over)

    def reply(self) -> DraftDone:
        """All grown nodes, after the end of the growth."""
        timing = self.timing() if self.num_passes else None
        return DraftDone(self.request.stamp, self.builder.tell(), self._num_held, timing)

    @property
    def _num_held(self) -> int:
        return self.request.num_committed - len(self.pending)
