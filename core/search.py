"""The search for the best plan, a few tables at a time.

Knows plans and how to forecast them; must not know what is done with them. The forecast of a plan with a table takes a
millisecond, there are thousands of plans, and who asks shares a thread with all streams. So the search begins at
several places, climbs, and can be interrupted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import replace

from core.planning import PLAIN, Bounds, Economy, Forecast, Plan, block_of, forecast
from core.shapes import RankLaw

BLOCK_NODES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
DEPTHS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 32, 48, 64)
ROWS_PER_PASS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_WIDTH = 4
"""Nodes of a block over its depth."""
SEARCH_TABLES = 5
"""Tables made in one go to forecast a plan; each takes up to a millisecond."""
MAX_KNOWN = 4096
"""As many as `core.tables` remembers."""


class Tables:
    """How many tables have been made for those who share this, and which need not be made again.

    `core.tables` remembers them for the whole process; who counted by that would decide otherwise after somebody else's
    searches, and a simulation could not be repeated.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self._known: OrderedDict[Hashable, None] = OrderedDict()

    def need(self, law: RankLaw, bounds: Bounds, plan: Plan) -> None:
        """`plan` is to be forecast; drafting just in time takes no table."""
        key = law, bounds, replace(plan, jit_nodes=0, jit_depth=0)
        if key not in self._known:
            self.num_made += 1
            if len(self._known) == MAX_KNOWN:
                self._known.popitem(last=False)
        self._known[key] = None
        self._known.move_to_end(key)


class Outlook:
    """Every question about one state of belief, each answered once: it is asked again every few rounds.

    The search for the best plan stops when it has made `SEARCH_TABLES` tables, and goes on when it is asked again: who
    asks shares a thread with all streams.
    """

    def __init__(
        self, law: RankLaw, economy: Economy, bounds: Bounds, start: Plan = PLAIN, tables: Tables | None = None
    ) -> None:
        """`start` is where to look first; any will do. `tables` are those of other outlooks, too."""
        self._tables = tables or Tables()
        self.law, self.economy, self.bounds = law, economy, bounds
        self._forecasts: dict[Plan, Forecast] = {}
        self._jits: dict[Plan, Plan] = {}
        self._best = max(_sequential(law, economy, bounds), key=_rate)
        self._todo = list(_starts(start, economy, bounds)) if bounds.is_pipelined and bounds.max_depth else []
        self._climbed: Forecast | None = None

    @property
    def is_settled(self) -> bool:
        """Whether `best` has nothing left to try."""
        return not self._todo

    def forecast(self, plan: Plan) -> Forecast:
        """What `plan` would yield."""
        found = self._forecasts.get(plan)
        if found is None:
            if plan.num_passes:
                self._tables.need(self.law, self.bounds, plan)
            found = self._forecasts[plan] = forecast(plan, self.law, self.economy, self.bounds)
        return found

    def best(self) -> Forecast:
        """What the best plan would yield, of those that have been tried."""
        num_made = self._tables.num_made
        while self._todo and self._tables.num_made < num_made + SEARCH_TABLES:
            self._try(self._todo.pop(0))
        return self._best

    def just_in_time(self, plan: Plan) -> Plan:
        """What is best to draft while the target waits, where all else goes by `plan`."""
        found = self._jits.get(plan)
        if found is None:
            rate = self.forecast(plan).rate
            found = self._jits[plan] = just_in_time(self.law, self.economy, self.bounds, rate, is_chain=plan.is_chain)
        return found

    def _try(self, plan: Plan) -> None:
        """Forecast one plan; when no better one is left to try, look around the best of them."""
        tried = self.forecast(plan)
        self._best = max(self._best, tried, key=_rate)
        if self._climbed is None or tried.rate > self._climbed.rate * (1.0 + 1e-9):
            self._climbed = tried
        if self._todo:
            return
        top = self._climbed.plan
        with_jit = self.just_in_time(top)
        near = (
            *_neighbours(top, self.economy, self.bounds),
            replace(top, jit_nodes=with_jit.block_nodes, jit_depth=with_jit.depth),
        )
        self._todo = [plan for plan in near if plan not in self._forecasts]


def best_plan(law: RankLaw, economy: Economy, bounds: Bounds, start: Plan = PLAIN) -> Forecast:
    """The plan with the highest rate, however long the search takes."""
    outlook = Outlook(law, economy, bounds, start)
    while not outlook.is_settled:
        outlook.best()
    return outlook.best()


def _rate(expected: Forecast) -> float:
    return expected.rate


def _sequential(law: RankLaw, economy: Economy, bounds: Bounds) -> Iterator[Forecast]:
    """Plain decoding, and every way to draft and verify in turn."""
    yield forecast(PLAIN, law, economy, bounds)
    for is_chain in (False, True) if _may_be_straight(economy, bounds) else (False,):
        for plan in _blocks(bounds, is_chain=is_chain):
            yield forecast(plan, law, economy, bounds)


def _blocks(bounds: Bounds, *, is_chain: bool) -> Iterator[Plan]:
    """Blocks of every depth, and of sizes that fit it."""
    for depth in (depth for depth in DEPTHS if depth <= bounds.max_depth):
        most = depth if bounds.is_chain or is_chain else min(bounds.max_block_tokens, MAX_WIDTH * depth)
        for nodes in BLOCK_NODES:
            if depth <= nodes <= most:
                yield Plan(nodes, depth, is_chain=is_chain)


def _may_be_straight(economy: Economy, bounds: Bounds) -> bool:
    """Whether it has to be asked if blocks should branch: where branches cost nothing they should, where they may."""
    return economy.branch_s > 0 and not bounds.is_chain


def just_in_time(law: RankLaw, economy: Economy, bounds: Bounds, rate: float, *, is_chain: bool = False) -> Plan:
    """The block to draft while the target waits, or none: the most tokens beyond what the time would yield at `rate`.

    The sum of tokens minus rate times time is what a choice adds in the long run (Dinkelbach); where every round is
    drafted so, `rate` is its own fixed point and this is the argmax of tokens over time. None where passes are shared:
    the others would go on without this session, and wait for their tables until the draft has served it.
    """
    best, gain = PLAIN, 0.0
    if economy.is_shared:
        return best
    plain_s = economy.verify_s(0.0)
    for plan in _blocks(bounds, is_chain=is_chain):
        tree = block_of(law, plan, bounds)
        added_s = economy.verify_tree_s(tree) - plain_s + economy.draft_s(tree.rows)
        if (gained := tree.tokens - rate * added_s) > gain:
            best, gain = plan, gained
    return best


def _starts(start: Plan, economy: Economy, bounds: Bounds) -> Iterator[Plan]:
    """Where to begin the search: few passes and many, narrow blocks and wide, each with the rows that are nearly free.

    One climb from one place ends on the nearest hill.
    """
    if not start.is_plain and start.num_passes:
        yield replace(start, jit_nodes=0, jit_depth=0)
    hidden = [depth for depth in DEPTHS if economy.draft_s((1,) * depth) <= economy.verify_s(depth)]
    most = min(max(hidden, default=1), bounds.max_depth)
    for depth in sorted({most, 1, 2, 3, -(-most // 2), min(most + 2, bounds.max_depth)}, key=lambda d: abs(d - most)):
        if depth <= bounds.max_depth:
            wide = depth if bounds.is_chain else min(2 * depth, bounds.max_block_tokens)
            for nodes in sorted({depth, wide}):
                yield Plan(nodes, depth, depth, _free_rows(depth, nodes, economy))
            if _may_be_straight(economy, bounds):
                yield Plan(depth, depth, depth, _free_rows(depth, depth, economy), is_chain=True)


def _free_rows(num_passes: int, nodes: int, economy: Economy) -> int:
    """How wide passes can be at hardly any cost: hidden behind the verification, or little dearer than narrow ones."""
    narrow_s = economy.draft_s((1,) * num_passes)
    hidden_s = max(economy.verify_s(nodes), 1.1 * narrow_s)
    return max((rows for rows in ROWS_PER_PASS if economy.draft_s((rows,) * num_passes) <= hidden_s), default=1)


def _neighbours(plan: Plan, economy: Economy, bounds: Bounds) -> Iterator[Plan]:
    if plan.is_chain:
        yield replace(plan, is_chain=False)
    elif _may_be_straight(economy, bounds):
        yield replace(plan, block_nodes=min(plan.block_nodes, plan.depth), is_chain=True)
    most = plan.depth if plan.is_chain else bounds.max_block_tokens
    for nodes in _beside(BLOCK_NODES, plan.block_nodes, most):
        yield replace(plan, block_nodes=nodes)
    for rows in _beside(ROWS_PER_PASS, plan.rows_per_pass, ROWS_PER_PASS[-1]):
        yield replace(plan, rows_per_pass=rows)
    for num_passes in (plan.num_passes - 1, plan.num_passes + 1):
        if 1 <= num_passes <= bounds.max_depth + 1:
            depth = min(num_passes, bounds.max_depth)
            nodes = depth if plan.is_chain else max(depth, plan.block_nodes)
            if not plan.is_chain or plan.block_nodes <= depth:
                yield replace(plan, num_passes=num_passes, depth=depth)
            yield replace(plan, num_passes=num_passes, depth=depth, block_nodes=nodes)


def _beside(grid: tuple[int, ...], value: int, most: int) -> Iterator[int]:
    """The grid's values next to `value`, up to `most`."""
    below = [x for x in grid if x < value]
    above = [x for x in grid if value < x <= most]
    yield from below[-1:]
    yield from above[:2]
