"""Records a session's draft tree at each verdict, by a policy that observes it.

Knows the tree as policies see it, and the output's tokens; decides nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from core.config import SpeculationConfig
from core.records import GenerationRequest
from core.speculation import EMPTY_BLOCK, EMPTY_PART, ROOT, UNRANKED, Part, SpeculationTree, TokenTree
from orchestrator.policy import Controller, RoundOutcome, TreePolicy
from orchestrator.policy.adaptive import AdaptivePolicy

EVERYTHING = 1 << 20
"""More nodes than any tree has."""
LEAST_PROBABILITY = 0.01
"""Less likely nodes are counted but not recorded."""


@dataclass(frozen=True, slots=True)
class SeenNode:
    text: str
    parent: int
    """Index of the parent, or -1 for the root."""
    probability: float
    """Path probability of the node, as estimated at the verdict."""
    is_drafted: bool
    """Whether the draft proposed the node; otherwise it was looked up in the text."""
    is_in_block: bool


@dataclass(frozen=True, slots=True)
class SeenRound:
    """The tree at a verdict, before re-rooting."""

    root: str
    """The last committed token."""
    nodes: tuple[SeenNode, ...]
    """Nodes, parents first."""
    path: tuple[int, ...]
    """Accepted nodes, from the root down."""
    next_text: str
    """The target's own token after the path."""
    next_node: int | None
    """The node of the next token, if the tree has it. It becomes the root, and the tree below it is kept."""
    num_nodes: int
    """Number of nodes of the whole tree."""
    num_kept: int
    """Number of nodes below the next root."""

    @property
    def num_in_block(self) -> int:
        """Number of verified guesses."""
        return sum(node.is_in_block for node in self.nodes)


@dataclass(slots=True)
class TreeWatch:
    """Records one stream in token ids; `rounds` converts the records to text."""

    _tree: SpeculationTree | None = None
    _block: TokenTree = EMPTY_BLOCK
    _before: tuple[TokenTree, Part] = (EMPTY_BLOCK, EMPTY_PART)
    _notes: list[_Note] = field(default_factory=list)

    def chose(self, tree: Any, block: Part) -> None:
        """Record the next block. A later choice replaces it."""
        assert isinstance(tree, SpeculationTree), "policies are shown the tree itself"
        self._tree, self._block = tree, tree.block(block)

    def verdict_came(self) -> None:
        """Record the tree as the verdict found it."""
        self._before = self._look()

    def rerooted(self, path: Sequence[int]) -> None:
        """Record the nodes of the block that the verdict accepted."""
        nodes, part = self._before
        self._notes.append(_Note(nodes, part, self._block, tuple(path), len(self._look()[0])))
        self._before, self._block = (EMPTY_BLOCK, EMPTY_PART), EMPTY_BLOCK

    def _look(self) -> tuple[TokenTree, Part]:
        if self._tree is None:
            return EMPTY_BLOCK, EMPTY_PART
        part = self._tree.best(EVERYTHING, EVERYTHING)
        return self._tree.block(part), part

    def rounds(self, output: Sequence[int], text_of: Callable[[int], str]) -> list[SeenRound]:
        """All rounds but the first (prefill) and the last (which needs no tree). `output` has all token ids."""
        ends = list(accumulate(len(note.path) + 1 for note in self._notes))
        tokens = [(output[start - 1], output[end - 1]) for start, end in pairwise(ends[:-1])]
        return [
            note.seen(root, next_token, text_of)
            for note, (root, next_token) in zip(self._notes[1:-1], tokens, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Note:
    """One verdict, in token ids."""

    nodes: TokenTree
    part: Part
    block: TokenTree
    path: tuple[int, ...]
    """Accepted nodes, as indices into the block."""
    num_kept: int

    def seen(self, root: int, next_token: int, text_of: Callable[[int], str]) -> SeenRound:
        """Convert to text, without the least likely nodes."""
        block = self._block_places()
        path = [block[node] for node in self.path]
        next_place = self.nodes.child(path[-1] if path else ROOT, next_token)
        shown = {*block, *path, *([] if next_place is None else [next_place])}
        shown |= {place for place, path_prob in enumerate(self.part.path_prob) if path_prob >= LEAST_PROBABILITY}
        number = {place: index for index, place in enumerate(sorted(shown))}
        return SeenRound(
            text_of(root),
            tuple(self._node(place, number, place in block, text_of) for place in number),
            tuple(number[place] for place in path),
            text_of(next_token),
            None if next_place is None else number[next_place],
            len(self.nodes),
            self.num_kept,
        )

    def _node(
        self, place: int, number: Mapping[int, int], is_in_block: bool, text_of: Callable[[int], str]
    ) -> SeenNode:
        return SeenNode(
            text_of(self.nodes.tokens[place]),
            number.get(self.nodes.parents[place], ROOT),
            round(float(self.part.path_prob[place]), 3),
            self.part.ranks[place] != UNRANKED,
            is_in_block,
        )

    def _block_places(self) -> list[int]:
        """The tree's nodes that equal the block's nodes. The tree may have grown since, but has lost no node."""
        places: list[int] = []
        for token, parent in zip(self.block.tokens, self.block.parents, strict=True):
            place = self.nodes.child(ROOT if parent == ROOT else places[parent], token)
            assert place is not None, "a tree loses no node before the verdict"
            places.append(place)
        return places


class WatchedPolicy(AdaptivePolicy):
    """The adaptive policy, observed. It offers no continuations, so that each choice is for the next block."""

    num_outcomes = 0

    def __init__(self, watch: TreeWatch, *args: Any) -> None:
        super().__init__(*args)
        self._watch = watch

    def choose(self, tree: Any, max_nodes: int, max_depth: int) -> Part:
        """Choose as the adaptive policy does, and record the choice."""
        block = super().choose(tree, max_nodes, max_depth)
        self._watch.chose(tree, block)
        return block

    def is_worth_a_plain_step(self, num_now: int) -> bool:  # noqa: ARG002
        return False

    def observe_interval(self, num_tokens: int, elapsed_s: float) -> None:
        """Called first after a verdict, before the tree changes."""
        self._watch.verdict_came()
        super().observe_interval(num_tokens, elapsed_s)

    def observe_round(self, seen: RoundOutcome) -> None:
        """Called when the tree has been re-rooted."""
        self._watch.rerooted(seen.path)
        super().observe_round(seen)


class WatchedController(Controller):
    """Gives sessions an observed policy."""

    def __init__(self, config: SpeculationConfig, watch: TreeWatch) -> None:
        super().__init__(config)
        self._watch = watch

    def policy(self, request: GenerationRequest) -> TreePolicy:
        return WatchedPolicy(self._watch, request, self._config, self._known)


def written(rounds: Sequence[SeenRound]) -> str:
    """The rounds as JSON, one per line."""
    return "[\n" + ",\n".join(json.dumps(asdict(each)) for each in rounds) + "\n]\n"


def read(text: str) -> list[SeenRound]:
    """Parse the output of `written`."""
    return [
        SeenRound(**{**each, "nodes": tuple(SeenNode(**node) for node in each["nodes"]), "path": tuple(each["path"])})
        for each in json.loads(text)
    ]
