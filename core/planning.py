"""How many tokens a second a way of guessing would yield.

Knows acceptance (RankLaw) and costs (Economy) as they are believed to be at the moment; must not know how they were
learned, and keeps nothing. The objective is the formula G of docs/control.md: tokens of a round over its time, with a
table for every likely outcome on hits and drafting just in time on misses; without tables, Leviathan et al. 2023,
Theorem 3.8. All sessions that share an engine are assumed to act alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from core.curve import Curve
from core.shapes import BestTree, RankLaw, best_tree
from core.tables import Prepared, TableBudget, prepared
from core.trees import Budget

JITTER = 0.03
"""Standard deviation of a round trip to an engine, over its mean."""
SHARED_JITTER = 0.1
"""The same where passes are shared: who comes late for the others' pass waits for the next."""
CHOSEN_WORTH = 1.75
"""Rows of a plan that do what one does that the draft chooses: it knows where it is in doubt."""
MORE_PASSES = 2
"""Times as many as planned that a draft may make for a block: it is waited for, and must be late at some time."""
SHARED_SESSIONS = 2.0
"""From here on sessions meet in the passes of an engine."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a session may do at most."""

    max_depth: int
    max_block_tokens: int
    max_table_tokens: int
    max_fanout: int
    is_pipelined: bool
    is_chain: bool = False


@dataclass(frozen=True, slots=True)
class Economy:
    """What things cost at the moment."""

    verify_pass_s: Curve
    draft_pass_s: Curve
    verify_wire_s: float
    draft_wire_s: float
    num_verifying: float = 1.0
    """Sessions that share a pass of the target."""
    num_drafting: float = 1.0
    """Sessions that share a pass of the draft."""
    branch_s: float = 0.0
    """What a branch adds to a pass of the target."""

    @property
    def is_shared(self) -> bool:
        """Whether sessions meet in the passes of the target."""
        return self.num_verifying >= SHARED_SESSIONS

    def halved(self) -> Economy:
        """The same for half of the sessions."""
        return replace(self, num_verifying=self.num_verifying / 2.0, num_drafting=max(1.0, self.num_drafting / 2.0))

    def verify_s(self, nodes: float, branches: float = 0.0) -> float:
        """A round trip to the target with a block of `nodes` nodes, when all send such a block."""
        pass_s = self.verify_pass_s(self.num_verifying * (nodes + 1.0)) + self.num_verifying * branches * self.branch_s
        return pass_s + self.verify_wire_s

    def verify_tree_s(self, tree: BestTree) -> float:
        """The same for the block `tree`."""
        return self.verify_s(len(tree), tree.num_branches)

    def draft_s(self, rows: tuple[int, ...]) -> float:
        """A round trip to the draft for passes of so many rows of each session."""
        return sum(self.draft_pass_s(self.num_drafting * row) for row in rows if row) + self.draft_wire_s

    def longer_s(self, verify_s: float, table_s: float) -> float:
        """Mean time until both have come, where each takes about so long: as long as the longer one, or a little more.

        Both jitter, so what is nearly as long as the other is sometimes the longer one. Of two normal times: Clark
        1961, "The greatest of a finite set of random variables", equation 2.
        """
        spread = (SHARED_JITTER if self.is_shared else JITTER) * math.hypot(verify_s, table_s)
        lead = (verify_s - table_s) / spread
        density, late = math.exp(-0.5 * lead * lead) / math.sqrt(2.0 * math.pi), 0.5 * math.erfc(lead / math.sqrt(2.0))
        return verify_s * (1.0 - late) + table_s * late + spread * density

    def price(self, rate: float, nodes: float) -> float:
        """Tokens that the batch loses by one more row in a pass, when each session yields `rate` tokens a second.

        The Lagrange multiplier of a shared budget of rows: equal for all sessions, so that verifying whatever is worth
        more is the same as filling the budget by survival.
        """
        rows = self.num_verifying * (nodes + 1.0)
        more = max(1.0, rows / 8.0)
        slope = (self.verify_pass_s(rows + more) - self.verify_pass_s(rows)) / more
        return self.num_verifying * rate * slope

    def pass_price(self, rate: float, rows: int) -> float:
        """Tokens that the time of one more pass of the draft would yield at `rate`, where the target waits for it.

        0 where passes are shared: it verifies others meanwhile.
        """
        return 0.0 if self.is_shared else rate * self.draft_pass_s(self.num_drafting * rows)

    def block_price(self, rate: float, expected: float, nodes: int, branches: int = 0) -> float:
        """Tokens that are lost by sending a block of `nodes` nodes and not none, where `expected` are usual.

        Who has the passes for himself pays for the time that his block takes: passes come in steps, and the next step
        must not make dear what lies below it. Where many share a pass the steps blur, and each row has a price.
        """
        if self.is_shared:
            return nodes * self.price(rate, expected) + branches * self.num_verifying * rate * self.branch_s
        return rate * (self.verify_s(nodes, branches) - self.verify_s(0.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """A way of guessing."""

    block_nodes: int = 0
    """Of a block; 0 is plain decoding. Where the draft chooses it may answer more, of which what pays is verified."""
    depth: int = 0
    """Of a block; where the target waits and the draft chooses, what it counts on."""
    num_passes: int = 0
    """Of the draft for a table; 0 prepares none."""
    rows_per_pass: int = 0
    jit_nodes: int = 0
    """Of a block drafted just in time, on a miss; 0 goes on without."""
    jit_depth: int = 0
    is_chain: bool = False
    """Blocks do not branch."""

    @property
    def is_plain(self) -> bool:
        return self.block_nodes == 0

    @property
    def gamma(self) -> int:
        """Guesses in a row at most."""
        return min(self.depth, self.block_nodes)


PLAIN = Plan()


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan would yield."""

    plan: Plan
    rate: float
    """Tokens a second of one session."""
    tokens: float
    """Of a round."""
    round_s: float
    hit_rate: float
    block_tokens: float
    """Nodes verified in a round that hits."""
    table_tokens: int


def table_budget(plan: Plan, bounds: Bounds, max_depth: int) -> TableBudget:
    """What a plan allows a table when no block may be deeper than `max_depth`."""
    return TableBudget(
        num_nodes=bounds.max_table_tokens,
        num_passes=plan.num_passes,
        rows_per_pass=plan.rows_per_pass,
        max_depth=min(plan.depth, max_depth),
        block_nodes=plan.block_nodes,
        fanout=bounds.max_fanout,
        is_chain=bounds.is_chain or plan.is_chain,
    )


def chosen_table(plan: Plan, bounds: Bounds, law: RankLaw, sureness: tuple[float, float], max_depth: int) -> Budget:
    """The same for a draft that chooses by itself. It takes the passes and rows that the forecast counts on, no more:
    so a table costs what was planned, and yields at least as much."""
    rows = [num_rows for num_rows in planned_table(plan, bounds, law).rows if num_rows]
    return Budget(
        num_nodes=bounds.max_table_tokens,
        num_passes=len(rows) or plan.num_passes,
        rows_per_pass=max(rows, default=plan.rows_per_pass),
        max_depth=min(plan.depth, max_depth),
        fanout=bounds.max_fanout,
        sureness=sureness,
        tail=_tail(law, bounds),
        is_chain=plan.is_chain,
    )


def chosen_block(
    plan: Plan,
    bounds: Bounds,
    law: RankLaw,
    sureness: tuple[float, float],
    max_depth: int,
    pass_price: Callable[[int], float],
) -> Budget:
    """What a draft may grow by its own judgement while the target waits, in passes as wide as the forecast's.

    A pass gains the chances of its nodes, each times that of a guess below it, and costs `pass_price(rows)` tokens.
    Where that is anything the draft goes on while it pays: deeper than planned if it is sure, less deep if it is not.
    """
    rows = block_of(law, replace(plan, depth=min(plan.depth, max_depth)), bounds).rows
    price = pass_price(max(rows))
    depth = min(MORE_PASSES * len(rows), bounds.max_depth, max_depth) if price else len(rows)
    return Budget(
        num_nodes=bounds.max_block_tokens,
        num_passes=depth,
        rows_per_pass=max(rows),
        max_depth=depth,
        fanout=bounds.max_fanout,
        sureness=sureness,
        tail=_tail(law, bounds),
        min_reach=price / law.at(1)[0],
        is_chain=bounds.is_chain or plan.is_chain,
    )


def _tail(law: RankLaw, bounds: Bounds) -> tuple[float, ...]:
    """Chances of the candidates after the first, if it is not that one."""
    head, *others = law.at(1)
    tail = [chance / (1.0 - head) for chance in others[: bounds.max_fanout - 1]]
    excess = max(1.0, sum(tail))
    return tuple(chance / excess for chance in tail)


def planned_table(plan: Plan, bounds: Bounds, law: RankLaw) -> Prepared:
    """What a plan expects of the table below the best block. Where the draft chooses, its rows are worth more."""
    above = block_of(law, plan, bounds).growth
    worth = 1.0 if law.is_sampled else CHOSEN_WORTH
    budget = replace(table_budget(plan, bounds, plan.depth), rows_per_pass=int(worth * plan.rows_per_pass))
    table = prepared(above.parents, above.ranks, law, budget)
    return replace(table, rows=tuple(math.ceil(num_rows / worth) for num_rows in table.rows))


def _filled(rows: tuple[int, ...]) -> tuple[int, ...]:
    """What a draft that chooses feeds: as much in each pass as the widest may have. Where passes are shared that is so
    for none: some sessions have had their table already, others have missed."""
    return (max(rows, default=0),) * sum(num_rows > 0 for num_rows in rows)


def forecast(plan: Plan, law: RankLaw, economy: Economy, bounds: Bounds) -> Forecast:
    """What `plan` would yield."""
    if plan.is_plain:
        round_s = economy.verify_s(0.0)
        return Forecast(plan, 1.0 / round_s, 1.0, round_s, 0.0, 0.0, 0)
    if plan.num_passes == 0:
        return _in_turn(plan, law, economy, bounds)
    return _pipelined(plan, law, economy, bounds)


def block_of(law: RankLaw, plan: Plan, bounds: Bounds) -> BestTree:
    """The best block that `plan` allows within the bounds."""
    return best_tree(law, plan.block_nodes, plan.depth, is_chain=bounds.is_chain or plan.is_chain)


def jit_of(plan: Plan) -> Plan:
    """What `plan` drafts just in time, as a plan of its own."""
    return Plan(plan.jit_nodes, plan.jit_depth, is_chain=plan.is_chain)


def _in_turn(plan: Plan, law: RankLaw, economy: Economy, bounds: Bounds) -> Forecast:
    """Draft, then verify: E(gamma) / (t_v + gamma t_d).

    Sessions that share engines fall into two halves, since who drafts misses the others' pass: each half drafts while
    the other is verified, and neither engine serves both at once.
    """
    tree = block_of(law, plan, bounds)
    tokens = 1.0 + tree.tokens
    if economy.is_shared:
        half = economy.halved()
        round_s = 2.0 * max(half.verify_tree_s(tree), half.draft_s(tree.rows))
    else:
        round_s = economy.verify_tree_s(tree) + economy.draft_s(tree.rows)
    return Forecast(plan, tokens / round_s, tokens, round_s, 0.0, len(tree), 0)


def _pipelined(plan: Plan, law: RankLaw, economy: Economy, bounds: Bounds) -> Forecast:
    """G: [h E_hit + (1 - h) E_miss] / [h max(t_v, t_table) + (1 - h)(max(t_v, t_table) + t_jit)].

    Where a pass is shared, hits and misses are verified together: t_v is that of their mean.
    """
    table = planned_table(plan, bounds, law)
    hit = table.hit_rate
    table_s = economy.draft_s(table.rows if law.is_sampled or economy.is_shared else _filled(table.rows))
    nodes = table.block_tokens / hit if hit else 0.0
    branches = block_of(law, plan, bounds).prefix(round(nodes)).num_branches  # blocks are best first
    jit = block_of(law, jit_of(plan), bounds)
    if economy.is_shared:
        mean_nodes = hit * nodes + (1.0 - hit) * len(jit)
        mean_branches = hit * branches + (1.0 - hit) * jit.num_branches
        round_s = economy.longer_s(economy.verify_s(mean_nodes, mean_branches), table_s)
    else:
        jit_s = economy.draft_s(jit.rows) if len(jit) else 0.0
        miss_s = economy.longer_s(economy.verify_tree_s(jit), table_s) + jit_s
        round_s = hit * economy.longer_s(economy.verify_s(nodes, branches), table_s) + (1.0 - hit) * miss_s
    tokens = 1.0 + table.accepted + (1.0 - hit) * jit.tokens
    return Forecast(plan, tokens / round_s, tokens, round_s, hit, nodes, len(table.growth))
