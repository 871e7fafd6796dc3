"""Continuous drafting: the part of one session in each pass of the draft engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from core.noise import row_of
from core.records import DraftDone, DraftRequest, DraftUpdate, Timing
from core.speculation import MAX_TOLD, ROOT, Candidates, TokenTree, TreeBuilder, TreeSpec
from workers.engine.jobs import Job
from workers.grammar import Mask
from workers.sampling import Kind, Place, Row
from workers.speaker import Speaker
from workers.step import StepRows


@dataclass(eq=False, slots=True)
class TreeJob(Job[DraftRequest]):
    """The growth of one session until its next message; one of the engine's jobs while it takes part in a pass.

    Where growth ends by itself it is a job like others, until its reply.
    """

    _pass: tuple[float, int] | None = None
    """Begin and number of rows of the last step that it took part in; None once it was told."""
    ahead: list[int] = field(default_factory=list)
    """Tokens in a row below the first node that is fed, whose rows are computed along (`workers.speaker`)."""
    _said: list[Candidates] = field(default_factory=list)
    """After the nodes that were fed and then after the tokens ahead; the first of them become part of the tree."""
    _tip: int = 0
    """The node whose child is the next token ahead."""
    _num_ahead_held: int = 0

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
        return self.num_fed + len(self.ahead)

    @property
    def num_fed(self) -> int:
        """Nodes that are fed in the next pass, beside the root."""
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

    def look_ahead(self, speaker: Speaker, room: int) -> None:
        """Have at most `room` rows ahead computed along, where they may be of use."""
        self._tip = self.builder.being_fed[0]
        most = min(room, speaker.num_ahead, self._most_ahead)
        text = [*self.held.log.tokens, *self.pending] if self.pending else self.held.log.tokens
        path = self.builder.path(self._tip)
        self.ahead = list(speaker.ahead(self.held.index, text, path, most)) if most > 0 else []

    @property
    def _most_ahead(self) -> int:
        """Nodes in a row that may be fed after the first of those that are being fed.

        Where the draft samples there are none: the duration of a block must not depend on its draws, since a late block
        is not used (docs/exactness.md, section 4). Of growth that ends by itself only a chain is fed node by node.
        """
        spec, held = self.tree_spec, self.held
        if held.spec.needs_q or held.grammar is not None or (self.ends and spec.rows_per_pass > 1):
            return 0
        most = spec.max_depth - 1 - self.builder.depths[self._tip]
        return min(most, self.builder.num_left - 1) if self.ends else most

    def last_rows(self) -> StepRows:
        """The pending tokens, or the nodes to be fed; and what is computed along."""
        tree, builder = self.held.tree, self.builder
        assert not builder.feeding or len(builder.rows) == 1 + len(tree), "the root and all that is held were fed"
        first = len(tree) + len(builder.feeding)
        above = len(tree) if builder.feeding else ROOT
        ahead = (above, *range(first, first + len(self.ahead) - 1)) if self.ahead else ()
        tokens = (*tree.tokens, *(builder.tokens[node] for node in builder.feeding), *self.ahead)
        parents = (*tree.parents, *(builder.held_parent(node) for node in builder.feeding), *ahead)
        return StepRows(self.held.kv, self.pending, TokenTree(tokens, parents), len(tree))

    def places(self) -> list[Place]:
        """The sampling context of each row of logits. Unless tokens are read or a grammar masks
        them, nodes of equal depth share it."""
        log, builder = self.held.log, self.builder
        below = builder.depths[self._tip] + 1
        depths = [*(builder.depths[node] for node in builder.being_fed), *range(below, below + len(self.ahead))]
        nodes = [*builder.being_fed, *(self._tip for _ in self.ahead)]
        masks = self.held.masks(self._paths)
        if self.held.spec.sampling.reads_tokens or masks is not None:
            return [
                self._place(depth, node, [*log.tokens, *path], mask)
                for depth, node, path, mask in zip(
                    depths, nodes, self._paths(), masks or [None] * len(depths), strict=True
                )
            ]
        if self.held.spec.needs_q:
            return [self._place(depth, node) for depth, node in zip(depths, nodes, strict=True)]
        at = {depth: self._place(depth) for depth in set(depths)}
        return [at[depth] for depth in depths]

    def _paths(self) -> list[list[int]]:
        """Below the text, of each row of logits."""
        above = self.builder.path(self._tip)
        ahead = ([*above, *self.ahead[: num + 1]] for num in range(len(self.ahead)))
        return [*map(self.builder.path, self.builder.being_fed), *ahead]

    def _place(self, depth: int, node: int = 0, seen: Sequence[int] = (), mask: Mask | None = None) -> Place:
        """Of `node`, where draws are made: nothing is computed ahead there."""
        spec, num_draws = self.held.spec, self._num_draws
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

    def take_said(self, said: Sequence[Candidates | None]) -> bool:
        """What is said after each of `places`. Whether it is sound; an unsound row ahead is as good as none."""
        num_sound = said.index(None) if None in said else len(said)
        self._num_ahead_held = 0
        self._said = [each for each in said[:num_sound] if each is not None]
        return num_sound >= len(self.builder.being_fed)

    def hold_fed(self) -> list[Candidates]:
        """Hold what was fed; what was said there, which the tree builder still needs."""
        return self._hold(len(self.builder.being_fed))

    def hold_next(self) -> list[Candidates]:
        """The same of the next token ahead, if the draft itself goes on with it; nothing where that is not so."""
        child = self.builder.child(self._tip, self.ahead[self._num_ahead_held]) if self._said else None
        if child is None or not self.builder.feed_only(child):
            return []
        self._tip = child
        self._num_ahead_held += 1
        return self._hold(1)

    def _hold(self, num: int) -> list[Candidates]:
        said, self._said = self._said[:num], self._said[num:]
        self.held.hold(said)
        self.builder.made_pass()
        return said

    def begin_again(self) -> None:
        self.pending = [*self.held.log.tokens, *self.pending]
        self.held.tree.clear()
        self.ahead = []
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
