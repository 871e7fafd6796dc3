"""Scores of the nodes of a beam search: the likeliest tokens after each.

Nodes that the last message had are held with their KV, and are not computed again. Knows jobs, logits and adjustments;
must not know which beams go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from core.records import UNSOUND, Likeliest, Refused, Verdict, is_sound
from core.speculation import ROOT, TokenTree
from workers.engine.jobs import VerifyJob
from workers.sampling import Row, prepare_adjustment, sampler
from workers.step import Readback, StepRows, Uploads


@dataclass(eq=False, slots=True)
class ScoringJob(VerifyJob):
    """A prefix to extend, and the nodes of a beam search to score after it."""

    num_scored: int = 0
    """Number of rows of logits in its last step."""
    first_depth: int = 0
    """Depth of the highest node that the message added; 0 for the root, or if it added none."""

    @property
    def new_nodes(self) -> list[int]:
        """Nodes of the block that are not held."""
        return [node for node, held in enumerate(self.held.tree.find(self.block)) if held is None]

    @property
    def num_tree_rows(self) -> int:
        return len(self.new_nodes)

    @property
    def num_logits(self) -> int:
        return self.num_scored

    def last_rows(self) -> StepRows:
        """Rows of the pending tokens, or none if the root's scores are held, then those of the new nodes."""
        held, block, new = self.held, self.block, self.new_nodes
        number = {ROOT: ROOT} | {node: at for node, at in enumerate(held.tree.find(block)) if at is not None}
        number |= {node: len(held.tree) + index for index, node in enumerate(new)}
        tokens = (*held.tree.tokens, *(block.tokens[node] for node in new))
        parents = (*held.tree.parents, *(number[block.parents[node]] for node in new))
        rows = StepRows(
            held.kv,
            self.pending,
            TokenTree(tokens, parents),
            len(held.tree),
            adapter=held.adapter,
            source=held.source,
        )
        self.num_scored = rows.num_wanted
        return rows

    def scored_rows(self) -> list[Row]:
        """The rows whose distributions are scored."""
        root, *new = self.draws(self.new_nodes)
        return [root, *new] if self.num_scored > len(new) else new

    def hold(self, found: Sequence[Likeliest]) -> None:
        """Store what was found after the rows of its last step."""
        tree, new = self.held.tree, self.new_nodes
        is_root_new = len(found) > len(new)
        if is_root_new:
            tree.root, *found = found
        depths = self.block.depths
        self.first_depth = 0 if is_root_new else min((depths[node] for node in new), default=0)
        number = {ROOT: ROOT} | {node: at for node, at in enumerate(tree.find(self.block)) if at is not None}
        for node, likeliest in zip(new, found, strict=True):
            number[node] = tree.add(number[self.block.parents[node]], self.block.tokens[node], likeliest)

    def reply(self) -> Verdict | Refused:
        """The likeliest tokens after the root and after each node; a refusal if those after the root are unsound."""
        tree, stamp = self.held.tree, self.request.stamp
        root = tree.root or ()
        if not is_sound(root):
            return Refused(stamp, "NaN or infinite scores of the target", is_final=True)
        nodes = [tree.candidates[node] for node in tree.find(self.block) if node is not None]
        found = zip((root, *nodes), (0, *self.block.depths), strict=True)
        return Verdict(
            stamp,
            (),
            root[0][0] if root else 0,
            len(self.held.log),
            timing=self.timing(),
            num_cached=self.num_adopted,
            likeliest=tuple([each if depth >= self.first_depth else () for each, depth in found]),
        )


def score(jobs: Sequence[ScoringJob], logits: Tensor) -> list[list[Likeliest]]:
    """The likeliest tokens after each row of `logits` [R, V] of these jobs."""
    rows = [row for job in jobs for row in job.scored_rows()]
    uploads, readback = Uploads(logits.device), Readback()
    adjust = prepare_adjustment(rows, logits.shape[1], uploads)
    uploads.send()
    values, ids = sampler.largest(
        adjust(logits.float().log_softmax(dim=-1)), max(job.held.spec.num_likeliest for job in jobs)
    )
    read_values, read_ids = readback.add(values), readback.add(ids)
    readback.wait()
    found = iter(zip(read_ids(), read_values(), strict=True))
    return [[_likeliest(*next(found), job.held.spec.num_likeliest) for _ in range(job.num_scored)] for job in jobs]


def _likeliest(ids: Sequence[int], values: Sequence[float], count: int) -> Likeliest:
    """The first `count`, without forbidden tokens. Of equals the lowest id is first."""
    if any(math.isnan(value) or value == math.inf for value in values):
        return UNSOUND
    ordered = sorted(zip(ids, values, strict=True), key=lambda each: (-each[1], each[0]))
    return tuple((token, value) for token, value in ordered[:count] if value > -math.inf)
