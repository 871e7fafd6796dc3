"""Draft tree growth of one session, across passes of the draft engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from core.noise import row_of
from core.records import DraftRequest, DraftUpdate, Features, Timing
from core.speculation import MAX_REPORTED, ROOT, Candidates, TokenTree, TreeBuilder, TreeSpec
from workers.engine.jobs import Job
from workers.grammar import Mask
from workers.sampling import DraftRow, Kind, Row
from workers.step import StepRows


@dataclass(eq=False, slots=True)
class TreeJob(Job[DraftRequest]):
    """Grows one session's draft tree until the session's next message.

    Continuous growth is in the engine's job list only while it joins a pass. Bounded growth is in the list until its
    last update.
    """

    _pass: tuple[float, int] | None = None
    """Start time and number of rows of the last step it joined; None once reported."""
    ahead: list[int] = field(default_factory=list)
    """Consecutive tokens below the first fed node, computed in the same pass (adr/guessers). The candidates after a
    token are used only if the tree continues with that token."""
    _proposals: list[Candidates] = field(default_factory=list)
    """Unused candidates after the fed nodes, then after the tokens ahead."""
    _tip: int = 0
    """Node whose child is the next token ahead."""
    _num_ahead_held: int = 0

    @property
    def tree_spec(self) -> TreeSpec:
        return self.request.growth

    @property
    def builder(self) -> TreeBuilder:
        return self.held.builder

    @property
    def ends(self) -> bool:
        """Whether the growth is bounded; a round then waits for it."""
        return self.tree_spec.ends

    @property
    def is_urgent(self) -> bool:
        """Whether a round waits for this job: for its reply, or for its root, without which there is no guess."""
        return self.ends or bool(self.pending)

    @property
    def num_tree_rows(self) -> int:
        return self.num_fed + len(self.ahead)

    @property
    def num_fed(self) -> int:
        """Number of nodes fed in the next pass, without the root."""
        return len(self.builder.feeding)

    @property
    def features(self) -> Features | None:
        return self.request.features

    @property
    def may_feed(self) -> bool:
        """Whether any node may be worth a row."""
        path_prob = 0.0 if self.pending else self.builder.best_path_prob
        return path_prob > 0.0 and path_prob >= self.tree_spec.min_path_prob

    @property
    def has_lost_root(self) -> bool:
        """Whether the guesses were dropped, so that the candidates after the text must be computed again."""
        return not self.pending and self.held.tree.root is None

    def record_step(self, started_s: float, num_rows: int, num_sessions: int) -> None:
        Job.record_step(self, started_s, num_rows, num_sessions)  # a class with slots has no super() without arguments
        self._pass = (started_s, num_rows)

    def look_ahead(self, most: int) -> None:
        """Choose at most `most` tokens ahead: those that followed the same n-gram earlier in the text."""
        self._tip = self.builder.being_fed[0]
        most = min(most, self._most_ahead)
        self.ahead = []
        if most > 0:
            text = [*self.held.log.tokens, *self.pending] if self.pending else self.held.log.tokens
            self.held.index.update(text)
            self.ahead = self.held.index.lookup(text, self.builder.path(self._tip), most)

    @property
    def _most_ahead(self) -> int:
        """Maximum number of consecutive nodes to feed after the first node being fed.

        0 if the draft samples: the duration of a block must not depend on its draws, because a late block is not used
        (docs/exactness.md, section 4). Bounded growth feeds nodes one by one only in a chain.
        """
        spec, held = self.tree_spec, self.held
        if held.spec.needs_q or held.grammar is not None or (self.ends and spec.rows_per_pass > 1):
            return 0
        most = spec.max_depth - 1 - self.builder.depths[self._tip]
        return min(most, self.builder.num_left - 1) if self.ends else most

    def last_rows(self) -> StepRows:
        """Rows of the pending tokens or of the nodes to feed, then rows of the tokens ahead."""
        tree, builder = self.held.tree, self.builder
        assert not builder.feeding or len(builder.rows) == 1 + len(tree), "the root and all that is held were fed"
        first = len(tree) + len(builder.feeding)
        above = len(tree) if builder.feeding else ROOT
        ahead = (above, *range(first, first + len(self.ahead) - 1)) if self.ahead else ()
        tokens = (*tree.tokens, *(builder.tokens[node] for node in builder.feeding), *self.ahead)
        parents = (*tree.parents, *(builder.held_parent(node) for node in builder.feeding), *ahead)
        return StepRows(
            self.held.kv,
            self.pending,
            TokenTree(tokens, parents),
            len(tree),
            features=self.features,
            source=self.held.source,
        )

    def draft_rows(self) -> list[DraftRow]:
        """Sampling input for each row of logits. Nodes of equal depth share it, unless their tokens matter."""
        seen, builder = self.held.seen_tokens, self.builder
        below = builder.depths[self._tip] + 1
        depths = [*(builder.depths[node] for node in builder.being_fed), *range(below, below + len(self.ahead))]
        nodes = [*builder.being_fed, *(self._tip for _ in self.ahead)]
        masks = self.held.masks(self._paths)
        if self.held.spec.sampling.reads_tokens or masks is not None:
            return [
                self._draft_row(depth, node, [*seen, *path], mask)
                for depth, node, path, mask in zip(
                    depths, nodes, self._paths(), masks or [None] * len(depths), strict=True
                )
            ]
        if self.held.spec.needs_q:
            return [self._draft_row(depth, node) for depth, node in zip(depths, nodes, strict=True)]
        at = {depth: self._draft_row(depth) for depth in set(depths)}
        return [at[depth] for depth in depths]

    def _paths(self) -> list[list[int]]:
        """Tokens from the end of the text to each row of logits."""
        above = self.builder.path(self._tip)
        ahead = ([*above, *self.ahead[: num + 1]] for num in range(len(self.ahead)))
        return [*map(self.builder.path, self.builder.being_fed), *ahead]

    def _draft_row(self, depth: int, node: int = 0, seen: Sequence[int] = (), mask: Mask | None = None) -> DraftRow:
        """Sampling input of one node; `node` matters only if the draft samples."""
        spec, num_draws = self.held.spec, self._num_draws
        row = Row(spec.sampling, len(self.held.log) + depth, seen, spec.prompt_len, mask)
        kind = Kind.of(spec.sampling, spec.verification)
        if not spec.needs_q:  # one extra, for the probability that the unreported tokens share
            return DraftRow(row, kind, num_ranks=MAX_REPORTED + 1)
        # In a chain the depth identifies a draw; in a tree the node does too, spaced by its number of draws.
        sample = row_of(depth, node * num_draws if num_draws > 1 else 0)
        return DraftRow(row, kind, sample, num_draws, spec.rule.with_replacement)

    @property
    def _num_draws(self) -> int:
        return self.tree_spec.fanout if self.tree_spec.ends else 1

    def take_proposals(self, candidates: Sequence[Candidates | None]) -> bool:
        """Store the candidates of each row; return whether each fed node has some.

        Rows from the first without candidates on are ignored.
        """
        num_sound = candidates.index(None) if None in candidates else len(candidates)
        self._num_ahead_held = 0
        self._proposals = [each for each in candidates[:num_sound] if each is not None]
        return num_sound >= len(self.builder.being_fed)

    def hold_fed(self) -> list[Candidates]:
        """Mark the fed nodes as held, and return their candidates for the tree builder."""
        return self._hold(len(self.builder.being_fed))

    def hold_next(self) -> list[Candidates]:
        """Like `hold_fed`, for the next token ahead; returns nothing if the draft does not continue with it."""
        child = self.builder.child(self._tip, self.ahead[self._num_ahead_held]) if self._proposals else None
        if child is None or not self.builder.feed_only(child):
            return []
        self._tip = child
        self._num_ahead_held += 1
        return self._hold(1)

    def _hold(self, num: int) -> list[Candidates]:
        candidates, self._proposals = self._proposals[:num], self._proposals[num:]
        self.held.hold(candidates)
        self.builder.count_pass()
        return candidates

    def restart(self) -> None:
        self.pending = [*self.held.log.tokens, *self.pending]
        self.held.tree.clear()
        self.ahead = []
        self.builder.begin()
        self.builder.set_spec(self.builder.tree_spec)  # allow its full number of passes again

    @property
    def is_done(self) -> bool:
        """Whether bounded growth has ended."""
        return not self.pending and self.builder.has_ended

    def choose(self, room: int) -> None:
        """Choose the next nodes of bounded growth, at most `room` of them."""
        if not self.pending:
            self.builder.feed_pass(room)

    def pass_update(self, since_s: float | None = None) -> DraftUpdate:
        """Update with the nodes of the last pass, or with the nodes kept from an earlier message before the first pass.

        `since_s` is the end of the previous pass, or None if the engine was idle. A pass is timed from there, because
        work between passes, such as sending updates, is part of its cost.
        """
        timing = None
        if self._pass is not None:
            started_s, num_rows = self._pass
            began_s = started_s if since_s is None else since_s
            timing, self._pass = Timing(0.0, monotonic() - began_s, 1, num_rows, self.num_sessions), None
        is_over = not self.pending and self.builder.has_fed_all
        return DraftUpdate(self.request.stamp, self.builder.report(), self._num_held, timing, is_over)

    def last_update(self) -> DraftUpdate:
        """Update with all nodes of bounded growth, after its end."""
        timing = self.timing() if self.num_passes else None
        return DraftUpdate(self.request.stamp, self.builder.report(), self._num_held, timing, is_over=True)

    @property
    def _num_held(self) -> int:
        return self.request.num_committed - len(self.pending)
