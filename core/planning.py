"""How far to guess where a draft is asked for each block: what each draft length would yield, and the best.

Knows acceptance (RankLaw) and costs (Economy) as they are believed to be at the moment; keeps nothing. In turn:
Leviathan et al. 2023, Theorem 3.8. Pipelined, where the draft samples: with a table of answers for every likely outcome
(`core.tables`). All sessions that share an engine are assumed to act alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from core.economy import Economy
from core.shapes import RankLaw
from core.tables import TableBudget, prepared

MAX_FANOUT = 32
"""Candidates of a place that are looked at."""
FIRST_DEPTH, FIRST_ROWS = 4, 16
"""Of a table, where nothing has been planned before."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A way of guessing."""

    depth: int = 0
    """Guesses in a row; 0 is plain decoding."""
    rows_per_pass: int = 0
    """Of the draft, for a table that is prepared while the target works; 0 prepares none."""

    @property
    def is_plain(self) -> bool:
        return self.depth == 0

    def table(self, num_nodes: int, max_depth: int) -> TableBudget:
        """What it allows a table when no block may be deeper than `max_depth`."""
        return TableBudget(num_nodes, self.rows_per_pass, min(self.depth, max_depth), MAX_FANOUT)


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
    table_tokens: int = 0


def best_plan(law: RankLaw, economy: Economy, max_depth: int, table_tokens: int, near: Plan = PLAIN) -> Forecast:
    """The best of all draft lengths in turn and, where `table_tokens` may be prepared, of the tables `near` a plan."""
    plans = [PLAIN, *(Plan(depth) for depth in range(1, max_depth + 1))]
    if table_tokens and max_depth:
        plans += tables_near(near, max_depth, table_tokens)
    return max((forecast(plan, law, economy, table_tokens) for plan in plans), key=lambda found: found.rate)


def tables_near(plan: Plan, max_depth: int, table_tokens: int) -> Iterator[Plan]:
    """Plans with a table that are a step away, or none. A forecast takes up to a millisecond: who asks climbs."""
    depth, rows = (plan.depth, plan.rows_per_pass) if plan.rows_per_pass else (min(FIRST_DEPTH, max_depth), FIRST_ROWS)
    for deep in range(max(1, depth - 1), min(depth + 1, max_depth) + 1):
        for wide in (rows // 2, rows, 2 * rows) if deep == depth else (rows,):
            if 1 <= wide <= table_tokens:
                yield Plan(deep, wide)


def forecast(plan: Plan, law: RankLaw, economy: Economy, table_tokens: int = 0) -> Forecast:
    """What `plan` would yield."""
    if plan.is_plain:
        round_s = economy.verify_s(0.0)
        return Forecast(plan, 1.0 / round_s, 1.0, round_s)
    if plan.rows_per_pass == 0:
        return _in_turn(plan, law, economy)
    return _with_table(plan, law, economy, table_tokens)


def _in_turn(plan: Plan, law: RankLaw, economy: Economy) -> Forecast:
    """Draft, then verify: E(gamma) / (t_v + gamma t_d)."""
    tokens = 1.0 + float(law.chain(plan.depth).sum())
    round_s = economy.in_turn_s(plan.depth, (1,) * plan.depth)
    return Forecast(plan, tokens / round_s, tokens, round_s)


def _with_table(plan: Plan, law: RankLaw, economy: Economy, table_tokens: int) -> Forecast:
    """[h E_hit + (1 - h) E_miss] / [max(t_v, t_table) + (1 - h) t_jit].

    On a miss the target waits for a chain; where passes are shared it goes on with the others, and nothing is guessed.
    """
    table = prepared(plan.depth, law, plan.table(table_tokens, plan.depth))
    missed = 0.0 if economy.is_shared else 1.0 - table.hit_rate
    tokens = 1.0 + table.accepted + missed * float(law.chain(plan.depth).sum())
    nodes = table.block_tokens + missed * plan.depth
    table_s, chain_s = economy.draft_s(table.rows), economy.draft_s((1,) * plan.depth)
    round_s = max(economy.verify_s(nodes), table_s) + missed * chain_s
    return Forecast(plan, tokens / round_s, tokens, round_s, len(table.growth))
