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
from workers.sampling import DraftRow, Kind, Row
from workers.step import StepRows


@dataclass(eq=False, slots=True)
class TreeJob(Job[DraftRequest]):
    """The growth of one session until its next message.

    Continuous growth is one of the engine's jobs only while it takes part in a pass; growth with an end of its own is
    a job until its reply.
    """

    _pass: tuple[float, int] | None = None
    """Start time and number of rows of the last step that it took part in; None once it was reported."""
    ahead: list[int] = field(default_factory=list)
    """Consecutive tokens below the first fed node, whose rows are computed in the same pass (docs/adr/0044). The
    candidates after one of them are used only if the tree continues with it."""
    _proposals: list[Candidates] = field(default_factory=list)
    """Candidates after the fed nodes and then after the tokens ahead, as far as not yet used."""
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
        """Whether a round waits for it: for its reply, or for its root, without which there is no guess."""
        return self.ends or bool(self.pending)

    @property
    def num_tree_rows(self) -> int:
        return self.num_fed + len(self.ahead)

    @property
    def num_fed(self) -> int:
        """Number of nodes fed in the next pass, the root not counted."""
        return len(self.builder.feeding)

    @property
    def may_feed(self) -> bool:
        """Whether some node may be worth a row."""
        path_prob = 0.0 if self.pending else self.builder.best_path_prob
        return path_prob > 0.0 and path_prob >= self.tree_spec.min_path_prob

    @property
    def has_lost_root(self) -> bool:
        """Whether the candidates after the text must be computed again, because the guesses were dropped."""
        return not self.pending and self.held.tree.root is None

    def took_part(self, started_s: float, num_rows: int, num_sessions: int) -> None:
        Job.took_part(self, started_s, num_rows, num_sessions)  # a class with slots has no super() without arguments
        self._pass = (started_s, num_rows)

    def look_ahead(self, most: int) -> None:
        """Choose the tokens ahead, at most `most`: those that followed the last tokens earlier in the text."""
        self._tip = self.builder.being_fed[0]
        most = min(most, self._most_ahead)
        self.ahead = []
        if most > 0:
            text = [*self.held.log.tokens, *self.pending] if self.pending else self.held.log.tokens
            self.held.index.follow(text)
            self.ahead = self.held.index.after(text, self.builder.path(self._tip), most)

    @property
    def _most_ahead(self) -> int:
        """Largest number of consecutive nodes that may be fed after the first of those that are being fed.

        0 where the draft samples: the time of a block must not depend on its draws, because a late block is not used
        (docs/exactness.md, section 4). Growth with an end of its own feeds nodes one by one only in a chain.
        """
        spec, held = self.tree_spec, self.held
        if held.spec.needs_q or held.grammar is not None or (self.ends and spec.rows_per_pass > 1):
            return 0
        most = spec.max_depth - 1 - self.builder.depths[self._tip]
        return min(most, self.builder.num_left - 1) if self.ends else most

    def last_rows(self) -> StepRows:
        """Rows of the pending tokens, or of the nodes to feed, and of the tokens ahead."""
        tree, builder = self.held.tree, self.builder
        assert not builder.feeding or len(builder.rows) == 1 + len(tree), "the root and all that is held were fed"
        first = len(tree) + len(builder.feeding)
        above = len(tree) if builder.feeding else ROOT
        ahead = (above, *range(first, first + len(self.ahead) - 1)) if self.ahead else ()
        tokens = (*tree.tokens, *(builder.tokens[node] for node in builder.feeding), *self.ahead)
        parents = (*tree.parents, *(builder.held_parent(node) for node in builder.feeding), *ahead)
        return StepRows(self.held.kv, self.pending, TokenTree(tokens, parents), len(tree))

    def draft_rows(self) -> list[DraftRow]:
        """What each row of logits is sampled with. Nodes of equal depth share it, unless their tokens matter."""
        log, builder = self.held.log, self.builder
        below = builder.depths[self._tip] + 1
        depths = [*(builder.depths[node] for node in builder.being_fed), *range(below, below + len(self.ahead))]
        nodes = [*builder.being_fed, *(self._tip for _ in self.ahead)]
        masks = self.held.masks(self._paths)
        if self.held.spec.sampling.reads_tokens or masks is not None:
            return [
                self._draft_row(depth, node, [*log.tokens, *path], mask)
                for depth, node, path, mask in zip(
                    depths, nodes, self._paths(), masks or [None] * len(depths), strict=True
                )
            ]
        if self.held.spec.needs_q:
            return [self._draft_row(depth, node) for depth, node in zip(depths, nodes, strict=True)]
        at = {depth: self._draft_row(depth) for depth in set(depths)}
        return [at[depth] for depth in depths]

    def _paths(self) -> list[list[int]]:
        """The tokens below the text that lead to each row of logits."""
        above = self.builder.path(self._tip)
        ahead = ([*above, *self.ahead[: num + 1]] for num in range(len(self.ahead)))
        return [*map(self.builder.path, self.builder.being_fed), *ahead]

    def _draft_row(self, depth: int, node: int = 0, seen: Sequence[int] = (), mask: Mask | None = None) -> DraftRow:
        """The row of a node; `node` matters only where draws are made."""
        spec, num_draws = self.held.spec, self._num_draws
        row = Row(spec.sampling, len(self.held.log) + depth, seen, spec.prompt_len, mask)
        kind = Kind.of(spec.sampling, spec.verification)
        if not spec.needs_q:  # one candidate more than is reported, for the probability that all others share
            return DraftRow(row, kind, num_ranks=MAX_TOLD + 1)
        # In a chain the depth alone names a draw; in a tree the node does, too, and leaves room for its draws.
        sample = row_of(depth, node * num_draws if num_draws > 1 else 0)
        return DraftRow(row, kind, sample, num_draws, spec.rule.with_replacement)

    @property
    def _num_draws(self) -> int:
        return self.tree_spec.fanout if self.tree_spec.ends else 1

    def take_proposals(self, candidates: Sequence[Candidates | None]) -> bool:
        """Take the candidates of each row; returns whether all fed nodes are sound. An unsound row ahead is ignored."""
        num_sound = candidates.index(None) if None in candidates else len(candidates)
        self._num_ahead_held = 0
        self._proposals = [each for each in candidates[:num_sound] if each is not None]
        return num_sound >= len(self.builder.being_fed)

    def hold_fed(self) -> list[Candidates]:
        """Hold the fed nodes; returns their candidates, for the tree builder."""
        return self._hold(len(self.builder.being_fed))

    def hold_next(self) -> list[Candidates]:
        """As `hold_fed`, for the next token ahead; returns nothing if the draft does not continue with it."""
        child = self.builder.child(self._tip, self.ahead[self._num_ahead_held]) if self._proposals else None
        if child is None or not self.builder.feed_only(child):
            return []
        self._tip = child
        self._num_ahead_held += 1
        return self._hold(1)

    def _hold(self, num: int) -> list[Candidates]:
        candidates, self._proposals = self._proposals[:num], self._proposals[num:]
        self.held.hold(candidates)
        self.builder.made_pass()
        return candidates

    def begin_again(self) -> None:
        self.pending = [*self.held.log.tokens, *self.pending]
        self.held.tree.clear()
        self.ahead = []
        self.builder.begin()
        self.builder.go_on(self.builder.tree_spec)  # with all of its passes

    @property
    def is_done(self) -> bool:
        """Whether growth with an end of its own has ended."""
        return not self.pending and self.builder.has_ended

    def choose(self, room: int) -> None:
        """Choose the next nodes of growth with an end of its own, at most `room` of them."""
        if not self.pending:
            self.builder.feed_pass(room)

    def draft_update(self, since_s: float | None = None) -> DraftUpdate:
        """The nodes that have grown since the last update.

        A pass is timed from the end of the one before, `since_s`, because work between two passes, such as sending
        updates, is part of its cost. `since_s` is None where the engine was idle before.
        """
        timing = None
        if self._pass is not None:
            started_s, num_rows = self._pass
            began_s = started_s if since_s is None else since_s
            timing, self._pass = Timing(0.0, monotonic() - began_s, 1, num_rows, self.num_sessions), None
        is_over = not self.pending and self.builder.has_fed_all
        return DraftUpdate(self.request.stamp, self.builder.report(), self._num_held, timing, is_over)

    def reply(self) -> DraftDone:
        """All grown nodes, after the end of the growth."""
        timing = self.timing() if self.num_passes else None
        return DraftDone(self.request.stamp, self.builder.report(), self._num_held, timing)

    @property
    def _num_held(self) -> int:
        return self.request.num_committed - len(self.pending)
