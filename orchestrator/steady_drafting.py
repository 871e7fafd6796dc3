"""A session's dealings with a draft that grows steadily: what it is told, what it tells, and the tree of both.

Knows the draft's lease, its messages and the speculation tree. Must not know the target: nothing here can change the
output, only how soon it comes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import numpy as np

from core.config import DECODE_TOKENS
from core.records import Call, CallTrace, DraftRequest, Missing, Refused, Sprouted, Stamp
from core.speculation.tree import SpeculationTree
from core.trees import ROOT
from orchestrator import messages as m
from orchestrator.guess import NO_GUESS, Guess
from orchestrator.held import Held
from orchestrator.marginal import MarginalPilot
from orchestrator.pair import Completion
from orchestrator.pilot import Found, Shape
from orchestrator.states import GROWING_TABLE, Growing, Machine, Trigger
from orchestrator.statistics import Statistics

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 60.0
MAX_OPEN = 4
"""Messages to a draft that it has not ended: with a silent one they must not become more and more."""


class SteadyDrafting:
    """The draft's side of one session. Methods that may ask something answer the commands for it."""

    def __init__(self, completion: Completion, pilot: MarginalPilot, stats: Statistics) -> None:
        self._pair = completion.pair
        self._pilot = pilot
        self._stats = stats
        self._log = completion.log
        self._machine = Machine(GROWING_TABLE, Growing.ABSENT)
        self._held = Held(completion.log, completion.spec)
        self._tree = SpeculationTree()
        self._nodes = np.empty(0, np.int64)
        """Of the tree, those of the block that was taken last."""
        self._grew_s = 0.0
        self._num_open = 0
        """Messages of which the draft has not said that they are overtaken."""
        self._is_behind = False
        """Whether it has not been told of the last verdict, so as not to leave more of them open."""
        self._is_late = False
        self._num_late_rounds = 0
        self._pause_s = self._pair.speculation.draft_retry_s
        self._jitter = random.Random(completion.session_id)  # noqa: S311  spreads load, keeps no secret

    def __repr__(self) -> str:
        return f"<SteadyDrafting {self._machine} {self._held} {self._tree}>"

    needs_q = False
    """Only where any rule may choose guesses is there steady growth."""

    # The lease

    def begin(self) -> list[m.Command]:
        return [m.PlaceDraft()] if self._pair.draft is not None else []

    def placed(self, name: str, epoch: int) -> list[m.Command]:
        self._machine.fire(Trigger.PLACED)
        self._held.place(name, epoch)
        self._num_open, self._is_behind = 0, False
        return self.ask()

    def place_later(self) -> m.Command:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return m.PlaceDraft(delay_s=pause_s * self._jitter.uniform(0.5, 1.0))

    def lose(self) -> list[m.Command]:
        self._stats.num_draft_failures += 1
        self._machine.fire(Trigger.LOST)
        self._tree = SpeculationTree()
        self._held.awaiting = None
        self._num_late_rounds = 0
        return [m.ReleaseDraft(), self.place_later()]

    def lost(self, epoch: int) -> list[m.Command]:
        return self.lose() if epoch == self._held.epoch and self._machine.can(Trigger.LOST) else []

    def close(self) -> None:
        self._machine.fire(Trigger.END)
        self._held.awaiting = None

    # Asking

    def ask(self) -> list[m.Command]:
        """Tell the draft of what was committed since it was last told."""
        if self._machine.state is Growing.ABSENT:
            return []
        steady = self._pilot.steady(self._room)
        self._is_behind = steady is not None and self._num_open >= MAX_OPEN
        if steady is None or self._is_behind:
            return []
        self._num_open += 1
        if self._held.num_tokens == 0:
            self._tree = SpeculationTree()  # it numbers anew
        self._machine.fire(Trigger.GROW)
        stamp, base, suffix, spec = self._held.snapshot()
        return [m.Grow(DraftRequest(stamp, base, suffix, steady, spec=spec))]

    @property
    def _room(self) -> int:
        draft = self._pair.draft
        assert draft is not None, "a draft is asked only where there is one"
        return min(draft.max_context_tokens, draft.kv_cache_tokens) - len(self._log)

    # What it tells

    def grew(self, event: m.DraftGrew) -> list[m.Command]:
        sprouted = event.sprouted
        is_current = self._held.answers(sprouted.stamp)
        if self._machine.state is not Growing.GROWING or sprouted.stamp.session != self._held.name or sprouted.stamp.epoch != self._held.epoch:
            self._stats.num_stale_replies += 1
            return []
        try:
            self._check(sprouted)
            self._tree.add(sprouted.told, is_current=is_current)
        except (ValueError, TypeError, OverflowError) as error:
            logger.warning("a draft's growth is corrupt: %r", error)
            return self.lose()
        self._is_late, self._num_late_rounds = False, 0
        self._grew_s = event.received_s
        if is_current:
            self._held.num_tokens = min(sprouted.held, len(self._log) - 1)
        if sprouted.timing is not None:
            self._pilot.saw_pass(sprouted.timing)
            self._stats.trace.append(
                CallTrace(
                    Call.TABLE,
                    event.received_s - sprouted.timing.computed_s,
                    event.received_s,
                    len(sprouted.told),
                    timing=sprouted.timing,
                )
            )
        return []

    def _check(self, sprouted: Sprouted) -> None:
        """Raises: ValueError when it is corrupt."""
        told = sprouted.told
        if len(told) and not 0 <= min(told.tokens) <= max(told.tokens) < self._pair.target.vocab_size:
            raise ValueError("a draft guessed a token outside the vocabulary")
        if not 0 <= sprouted.held <= len(self._log):
            raise ValueError("a draft holds more than it was sent")

    def ended(self, event: m.DraftReplied) -> list[m.Command]:
        """The reply to a message that is not overtaken: the draft does not go on."""
        reply = event.reply
        if (reply.stamp.session, reply.stamp.epoch) != (self._held.name, self._held.epoch):
            return []
        self._num_open = max(0, self._num_open - 1)
        if not self._held.answers(reply.stamp):
            return self.ask() if self._is_behind else []
        if isinstance(reply, Missing) and self._held.must_resend(reply.held):
            self._held.num_tokens = 0
            return self.ask()
        return self.lose()

    # Blocks

    def reroot(self, tokens: Sequence[int]) -> tuple[Found, int | None, int]:
        """These tokens were committed, accepted guesses and then the target's own.

        Whether the tree goes on below them; and the rank of the last one among what the tree has at its place beside
        the block, and of how many.
        """
        node, was_grown = self._end(tokens[:-1]), len(self._tree) > 0
        rank, num_listed = None, 0
        if node is None:
            self._tree.prune()
        else:
            rank, num_listed = self._outcome(node, tokens[-1])
            self._tree.reroot(node, tokens[-1])
        self._nodes = np.empty(0, np.int64)
        if self._machine.state is not Growing.GROWING or not was_grown:
            return Found.NOT_ASKED, rank, num_listed
        return (Found.HIT if len(self._tree) else Found.MISS), rank, num_listed

    def _end(self, tokens: Sequence[int]) -> int | None:
        """The node that these tokens lead to, if the tree has it."""
        node = ROOT
        for token in tokens:
            found = self._tree.child(node, token)
            if found is None:
                return None
            node = found
        return node

    def _outcome(self, node: int, token: int) -> tuple[int | None, int]:
        in_block = set(self._nodes.tolist())
        others = [int(self._tree.tokens[child]) for child in self._tree.children(node) if int(child) not in in_block]
        return (others.index(token) if token in others else None), len(others)

    def block(self, max_depth: int, max_nodes: int) -> Guess:
        """The likeliest nodes that pay."""
        tree = self._tree
        nodes = tree.best(min(max_nodes, self._pilot.max_nodes), min(max_depth, self._pilot.max_depth))
        nodes = nodes[: self._pilot.num_worth(tree.reach[nodes])]
        self._nodes = nodes
        if not len(nodes):
            return NO_GUESS
        block = tree.block(nodes)
        shape = Shape(
            block.parents, tuple(tree.ranks[nodes].tolist()), tuple(tree.leads[nodes].tolist()), (0.0,) * len(nodes)
        )
        return Guess(block, shape)

    def wait_s(self, max_depth: int, now_s: float) -> float | None:
        """How long the draft's next pass may be waited for; None where it is not worth it."""
        if self._machine.state is not Growing.GROWING or self._is_late or self._held.num_behind > DECODE_TOKENS:
            return None
        tree = self._tree
        chosen = tree.reach[self._nodes]
        leaves = tree.reach[tree.leaves] if len(tree) else np.ones(1)
        eta_s = max(self._grew_s + self._pilot.pass_s - now_s, self._pilot.pass_s / 4) if len(tree) else self._pilot.miss_s
        return self._pilot.patience(chosen, leaves, eta_s) if max_depth > 0 else None

    def late(self, stamp: Stamp) -> list[m.Command]:
        """Nothing has come in time."""
        if not self._held.answers(stamp) or self._is_late:
            return []
        self._is_late = True
        self._num_late_rounds += 1
        if self._num_late_rounds >= self._pair.speculation.breaker_rounds:
            return self.lose()
        self._stats.num_draft_failures += 1
        return []

    @property
    def awaited(self) -> Stamp | None:
        return self._held.awaiting
