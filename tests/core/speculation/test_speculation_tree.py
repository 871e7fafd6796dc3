"""The orchestrator's tree: what a draft tells hangs where it belongs, whatever the verdicts did meanwhile."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.reference import re_root
from core.speculation.growth import NewNodes
from core.speculation.guesser import Guesses
from core.speculation.speculation_tree import SpeculationTree
from core.speculation.token_tree import ROOT, SparseDistribution, TokenTree


def new_nodes(first, *nodes, root=ROOT):
    """Each node: parent, token, chance."""
    parents, tokens, chances = zip(*nodes, strict=True) if nodes else ((), (), ())
    return NewNodes(first, parents, tokens, tuple(range(len(nodes))), chances, (0.9,) * len(nodes), root)


def foresees(tree, tokens):
    """Whether these are nodes, one below the other from the root down."""
    return tree.part_of(TokenTree.chain(tokens)) is not None


def paths(tree):
    """Tokens from the root to each node, with the chance to get there."""
    part = tree.best(1000, max_depth=1000)
    found = dict(zip(paths_of(tree.block(part)), part.path_prob.tolist(), strict=True))
    assert len(found) == len(part) == len(tree), "no two siblings are alike"
    return found


def paths_of(block):
    """Tokens from the root to each node."""
    found = []
    for token, parent in zip(block.tokens, block.parents, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


def tokens(tree, part):
    return list(tree.block(part).tokens)


FIRST = new_nodes(0, (ROOT, 5, 0.5), (ROOT, 6, 0.3), (0, 7, 0.8), (2, 8, 0.5))


@pytest.fixture
def tree():
    tree = SpeculationTree()
    tree.add(FIRST)
    return tree


def test_a_node_is_reached_through_those_above_it(tree):
    assert paths(tree) == pytest.approx({(5,): 0.5, (6,): 0.3, (5, 7): 0.4, (5, 7, 8): 0.2})


def test_a_block_is_the_likeliest_nodes_and_a_prefix_of_it_is_a_tree(tree):
    nodes = tree.best(3, max_depth=9)
    assert tree.block(nodes) == TokenTree((5, 7, 6), (ROOT, 0, ROOT))
    assert tree.block(nodes.head(2)) == TokenTree.chain([5, 7])
    assert tokens(tree, tree.best(9, max_depth=1)) == [5, 6]
    assert len(tree.best(0, max_depth=9)) == len(tree.best(9, max_depth=0)) == 0


def test_branches_are_counted_as_far_as_a_block_goes(tree):
    nodes = tree.best(9, max_depth=9)
    assert tokens(tree, nodes) == [5, 7, 6, 8]
    assert nodes.branches().tolist() == [0, 0, 1, 1], "6 is the second below the root"
    assert nodes.head(0).branches().tolist() == []


def test_the_straight_part_of_a_block_is_its_likeliest_chain(tree):
    nodes = tree.best(9, max_depth=9)
    assert tokens(tree, nodes.straight()) == [5, 7, 8]
    assert nodes.straight().path_prob.tolist() == pytest.approx([0.5, 0.4, 0.2])
    assert len(nodes.head(0).straight()) == 0


def test_a_verdict_keeps_what_grew_below_its_token(tree):
    assert foresees(tree, [5, 7])
    tree.reroot([5, 7])
    assert paths(tree) == pytest.approx({(8,): 0.5})
    tree.add(new_nodes(4, (2, 9, 0.25), (3, 10, 0.5)))
    assert paths(tree) == pytest.approx({(8,): 0.5, (9,): 0.25, (8, 10): 0.25})


def test_what_was_told_before_the_verdict_is_known_is_kept_where_it_still_fits(tree):
    tree.reroot([5])
    tree.add(new_nodes(4, (ROOT, 9, 0.1), (1, 10, 0.5), (0, 11, 0.1), (2, 12, 0.5), (5, 13, 0.9)), num_unknown=1)
    assert paths(tree) == pytest.approx({(7,): 0.8, (7, 8): 0.4, (11,): 0.1, (7, 12): 0.4})


def test_a_root_that_was_on_its_way_is_found_when_it_comes(tree):
    """The verdict's token is not known yet; the message that tells of it, and of what follows, is under way."""
    assert not foresees(tree, [5, 20])
    tree.reroot([5, 20])
    assert len(tree) == 0
    tree.add(new_nodes(4, (0, 20, 0.1), (0, 21, 0.1), (4, 22, 0.5)), num_unknown=2)
    tree.add(new_nodes(7, (4, 23, 0.25), (6, 24, 0.5)))
    assert paths(tree) == pytest.approx({(22,): 0.5, (23,): 0.25, (22, 24): 0.25})


def test_a_root_that_the_draft_never_told_of_is_called_root(tree):
    tree.reroot([6, 99])
    tree.add(new_nodes(4, (ROOT, 99, 0.5)))
    assert paths(tree) == {(99,): 0.5}, "it follows the root, and is not taken for it"


def test_after_tokens_that_no_node_leads_to_nothing_is_left(tree):
    tree.reroot([90, 91])
    tree.add(new_nodes(4, (0, 9, 0.5)), num_unknown=2)
    tree.add(new_nodes(5, (ROOT, 9, 0.5)))
    assert paths(tree) == {(9,): 0.5}


def test_a_node_that_is_there_already_is_not_there_twice(tree):
    """A draft that has forgotten its guesses tells them again, with other numbers."""
    tree.add(new_nodes(4, (ROOT, 5, 0.6), (4, 7, 0.9), (5, 30, 0.5), (ROOT, 31, 0.1), (ROOT, 31, 0.1)))
    assert paths(tree) == pytest.approx(
        {(5,): 0.5, (6,): 0.3, (5, 7): 0.4, (5, 7, 8): 0.2, (5, 7, 30): 0.2, (31,): 0.1}
    )


def test_who_has_used_very_many_numbers_is_asked_to_begin_anew(tree, monkeypatch):
    monkeypatch.setattr("core.speculation.speculation_tree.MAX_NUMBERS", 4)
    tree.reroot((5,))
    assert not tree.needs_full_report
    tree.add(new_nodes(4, (2, 9, 0.1)))
    tree.reroot((7,))
    assert tree.needs_full_report


def test_what_was_told_already_changes_nothing(tree):
    before = paths(tree)
    tree.add(FIRST)
    assert paths(tree) == before
    assert tree.num_reported == 4


def test_a_message_that_was_lost_is_noticed(tree):
    with pytest.raises(ValueError, match="begins at node 6, but 4"):
        tree.add(new_nodes(6, (0, 9, 0.5)))


@pytest.mark.parametrize(
    "columns",
    [
        ((0,), (1,), (0,), (0.5,), (0.5,)),  # its own parent
        ((-2,), (1,), (0,), (0.5,), (0.5,)),
        ((ROOT,), (1,), (-1,), (0.5,), (0.5,)),
        ((ROOT,), (1,), (0,), (0.0,), (0.5,)),
        ((ROOT,), (1,), (0,), (1.5,), (0.5,)),
        ((ROOT,), (1,), (0,), (float("nan"),), (0.5,)),
        ((ROOT,), (1,), (0,), (0.5,), (-0.5,)),
        ((ROOT,), (1, 2), (0,), (0.5,), (0.5,)),
    ],
)
def test_what_cannot_be_growth_is_none(columns):
    with pytest.raises(ValueError):
        NewNodes(0, *columns)


# Guessers


def guessed(tree, top, *nodes):
    """A chain below these tokens, each node a token and its chance."""
    tokens, chances = zip(*((token, 0.0) for token in top), *nodes, strict=True)
    tree.add_guesses(Guesses.chain(tokens, chances))


def test_what_a_guesser_proposes_hangs_beside_what_the_draft_told(tree):
    guessed(tree, (), (5, 0.4), (9, 0.5), (10, 0.5))
    assert paths(tree) == pytest.approx(
        {(5,): 0.5, (6,): 0.3, (5, 7): 0.4, (5, 7, 8): 0.2, (5, 9): 0.25, (5, 9, 10): 0.125}
    ), "what both guess is one node, and the surer of them counts"
    assert tree.block(tree.best(4, max_depth=9)).tokens == (5, 7, 6, 9)
    guessed(tree, (), (5, 0.9))
    assert paths(tree)[(5, 7)] == pytest.approx(0.9 * 0.8)


def test_a_node_is_called_the_drafts_else_that_guessers_which_is_surest_of_it(tree):
    for source, chance in (("a", 0.3), ("b", 0.6), ("c", 0.6), ("d", 0.2)):
        tree.add_guesses(Guesses.chain([5, 9], [0.9, chance]), source)
    tree.add_guesses(Guesses.chain([10], [0.0]), "e")
    part = tree.best(9, max_depth=9)
    sources = dict(zip(tree.block(part).tokens, part.sources, strict=True))
    assert sources == {5: "draft", 6: "draft", 7: "draft", 8: "draft", 9: "b", 10: "e"}
    tree.reroot([5])
    assert set(tree.best(9, 9).sources) == {"draft"}


def test_a_guess_with_branches_is_a_tree():
    tree = SpeculationTree()
    tree.add_guesses(Guesses((ROOT, 0, ROOT, 0), (1, 2, 3, 4), (0.5, 0.5, 0.25, 0.1)))
    assert paths(tree) == pytest.approx({(1,): 0.5, (1, 2): 0.25, (3,): 0.25, (1, 4): 0.05})


def test_a_local_node_that_the_draft_tells_of_becomes_the_drafts(tree):
    guessed(tree, (5, 7, 8), (9, 0.4), (10, 0.5))
    tree.add(new_nodes(4, (3, 9, 0.2), (4, 11, 0.5)))
    assert len(tree.best(9, 9).drafted()) == 6, "all but one"
    assert paths(tree)[(5, 7, 8, 9, 11)] == pytest.approx(0.2 * 0.4 * 0.5)
    tree.reroot([5, 7])
    assert paths(tree) == pytest.approx({(8,): 0.5, (8, 9): 0.1, (8, 9, 11): 0.05}), "by the draft's own chances"
    tree.add(new_nodes(6, (4, 12, 0.5)))
    assert (8, 9, 12) in paths(tree), "the draft's number for it holds"


def test_what_the_draft_alone_has_told_may_follow_the_root(tree):
    tree.add_guesses(Guesses((ROOT, ROOT), (6, 9), (0.4, 0.4)), "suffix")
    assert [tree.is_only_drafted(token) for token in (5, 6, 7, 9, 10)] == [True, False, False, False, False]


def test_what_guessers_proposed_does_not_outlast_the_verdict(tree):
    guessed(tree, (), (5, 0.9), (9, 0.9), (10, 0.9))
    assert foresees(tree, [5])
    tree.reroot([5])
    assert paths(tree) == pytest.approx({(7,): 0.8, (7, 8): 0.4})


def test_a_root_that_only_a_guesser_knew_is_the_drafts_once_it_tells_of_it(tree):
    """The message that tells of it, and of what follows, may answer an earlier or the current prefix."""
    guessed(tree, (), (5, 0.5), (9, 0.9), (10, 0.9), (11, 0.9))
    assert foresees(tree, [5, 9, 10])
    tree.reroot([5, 9, 10])
    assert len(tree) == 0
    tree.add(new_nodes(4, (0, 9, 0.1), (4, 10, 0.1), (4, 77, 0.1), (5, 12, 0.5)), num_unknown=3)
    tree.add(new_nodes(8, (7, 13, 0.5), root=5))
    assert paths(tree) == pytest.approx({(12,): 0.5, (12, 13): 0.25})
    assert not tree.needs_full_report


def test_what_follows_an_earlier_root_is_found_by_the_text(tree):
    """The draft called ROOT what was the root two verdicts ago."""
    tree.reroot([90])
    tree.reroot([91])
    tree.add(new_nodes(4, (ROOT, 91, 0.5), (4, 92, 0.5)), num_unknown=1)
    assert paths(tree) == {(92,): 0.5}


@dataclass
class PlainTree:
    """The same by paths from the beginning of the text: slow, and simple enough to be right. A fake."""

    root: tuple = ()
    path_prob: dict = field(default_factory=dict)
    numbered: list = field(default_factory=list)

    def add(self, nodes, root_then):
        for parent, token, chance in nodes:
            above = root_then if parent == ROOT else self.numbered[parent]
            path = (*above, token)
            self.numbered.append(path)
            self.path_prob.setdefault(path, chance)

    def paths(self):
        """Those of the reference's tree, re-rooted, each with the product of the chances on its way."""
        tree = {}
        for path in self.path_prob:
            above = tree
            for token in path:
                above = above.setdefault(token, {})
        found, pending = {}, [((), 1.0, re_root(tree, self.root))]
        for path, path_prob, below in pending:
            for token, tree in below.items():
                child = (*path, token)
                found[child] = path_prob * self.path_prob.get((*self.root, *child), 0.0)
                pending.append((child, found[child], tree))
        return found


@given(st.data())
def test_it_is_what_a_list_of_paths_would_be(data):
    """Growth in any order between verdicts of which the draft knows, some of them off the tree."""
    tree, plain = SpeculationTree(), PlainTree()
    for _ in range(data.draw(st.integers(1, 8))):
        below = [number for number, path in enumerate(plain.numbered) if path[: len(plain.root)] == plain.root]
        below = [number for number in below if plain.numbered[number] != plain.root or len(plain.root) == 0]
        nodes, free = [], {ROOT, *below}
        for index in range(data.draw(st.integers(0, 5))):
            parent = data.draw(st.sampled_from(sorted(free)))
            nodes.append((parent, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0.25, 0.5, 0.75]))))
            free.add(len(plain.numbered) + index)
        tree.add(new_nodes(len(plain.numbered), *nodes))
        plain.add(nodes, plain.root)
        assert paths(tree) == pytest.approx(plain.paths())
        if data.draw(st.booleans()):
            tokens = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
            tree.reroot(tokens)
            plain.root = (*plain.root, *tokens)
            assert paths(tree) == pytest.approx(plain.paths())
    order = tree.best(len(tree), max_depth=99).path_prob
    assert (np.diff(order) <= 0).all()


# Draws


LAWS = tuple(SparseDistribution((5 + place, 90), (0.75, 0.25)) for place in range(3))
CHAIN = NewNodes(0, (ROOT, 0, 1), (5, 6, 90), (0,) * 3, (0.75,) * 3, (0.75,) * 3, q=LAWS)


@pytest.fixture
def drawn():
    tree = SpeculationTree(is_sampled=True)
    tree.add(CHAIN)
    return tree


@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_a_block_of_draws_tells_what_each_was_drawn_from(drawn, num_nodes):
    block = drawn.block(drawn.first_chain(num_nodes))
    assert block == TokenTree.chain([5, 6, 90][:num_nodes], LAWS[:num_nodes])


def test_the_law_of_a_draw_is_that_of_its_node_in_whatever_messages_it_was_told():
    tree = SpeculationTree(is_sampled=True)
    guessed(tree, (), (30, 0.9))  # a node before them, so that numbers are not places
    for place in range(3):
        tree.add(NewNodes(place, (place - 1,), (CHAIN.tokens[place],), (0,), (0.75,), (0.75,), q=(LAWS[place],)))
    assert tree.block(tree.first_chain(9)) == TokenTree.chain([5, 6, 90], LAWS)
    assert tree.block(tree.first_chain(9).head(2)).q == LAWS[:2]


def test_what_was_looked_up_is_sure_of_itself(drawn):
    tree = SpeculationTree(is_sampled=True)
    guessed(tree, (), (30, 0.9), (31, 0.5))
    certain = tuple(SparseDistribution((token,), (1.0,)) for token in (30, 31))
    assert tree.block(tree.best(2, 9)) == TokenTree.chain([30, 31], certain)
    guessed(drawn, (5, 6, 90), (40, 0.5))
    assert drawn.block(drawn.best(9, 9)).q == (*LAWS, SparseDistribution((40,), (1.0,))), "behind draws, too"


def test_no_draw_outlasts_its_verdict(drawn):
    """Nor a node that might be taken for one: what was drawn is of use for one block."""
    assert foresees(drawn, [5])
    drawn.reroot([5])
    assert len(drawn) == 0
    drawn.add(NewNodes(3, (1,), (91,), (0,), (0.5,), (0.5,), q=LAWS[:1]), num_unknown=1)
    assert len(drawn) == 0


def test_where_nothing_is_drawn_blocks_carry_no_q(tree):
    assert tree.block(tree.best(3, 9)).q == ()


# Outcomes


def test_where_a_block_may_go_on_otherwise_the_likeliest_first(tree):
    """Beside 5 there is 6; below 7, which ends the block, 8."""
    tree.add(new_nodes(4, (1, 9, 0.9)))
    first, second = tree.outcomes(tree.best(2, 9), 9)
    assert (tokens(tree, first.top), first.depth, first.top.path_prob.tolist()) == ([6], 1, pytest.approx([0.3]))
    assert (tokens(tree, second.top), second.depth, second.top.path_prob.tolist()) == ([8], 3, pytest.approx([0.2]))
    assert paths(first.below) == pytest.approx({(9,): 0.9}), "as if the text had got there"
    assert len(tree.outcomes(tree.best(2, 9), 1)) == 1
    assert [tokens(tree, each.top) for each in tree.outcomes(tree.best(0, 9), 9)] == [[5], [6]]


def test_an_offer_is_one_tree_of_several_parts(tree):
    tree.add(new_nodes(4, (1, 9, 0.9)))
    taken = tree.best(2, 9)
    first, _ = tree.outcomes(taken, 9)
    whole = taken.with_below(first.end, first.top).with_below(2, first.below.best(9, 9))
    assert tree.block(whole) == TokenTree((5, 7, 6, 9), (ROOT, 0, ROOT, 2))
    assert (whole.ranks, whole.depth) == ((0, 2, 1, 0), 2)


def test_a_block_is_found_again_by_its_tokens(tree):
    block = tree.block(tree.best(3, 9))
    part = tree.part_of(block)
    assert tree.block(part) == block
    assert part.path_prob.tolist() == pytest.approx([0.5, 0.4, 0.3])
    tree.reroot([5])
    assert tree.part_of(block) is None


def test_what_the_draft_had_told_of_that_no_block_had(tree):
    block = tree.best(1, 9)
    assert tokens(tree, block) == [5]
    assert tree.unverified((), block) is None, "it is in the block"
    assert tree.unverified((6,), block) is None, "nothing grew there"
    assert tree.unverified((77,), block) is None
    guessed(tree, (6,), (77, 0.9))
    assert tree.unverified((6,), block) is None, "the draft has not told of it"
    tree.add(NewNodes(4, (1,), (9,), (0,), (0.6,), (0.7,)))
    assert tree.unverified((6,), block) == (9, 0.7)


# Memory


def test_what_no_verdict_can_lead_to_is_forgotten_in_time(monkeypatch):
    """However long the text: nodes that are gone, their numbers, and tokens that were committed long ago."""
    monkeypatch.setattr("core.speculation.speculation_tree.MAX_TRAIL", 16)
    tree, gone = SpeculationTree(max_depth=20), []
    for round_ in range(200):
        first = tree.num_reported
        tree.add(new_nodes(first, (ROOT, 1, 0.5), (ROOT, 2, 0.4), (first, 3, 0.5), (first + 1, 4, 0.5)))
        gone.append(weakref.ref(tree._children(tree._root)[2]))
        tree.reroot([1, 7 if round_ % 2 else 3])
    assert len(tree._trail) == 16
    assert num_unseen(tree) < 100
    assert len(tree._above_root) < 50
    assert sum(each() is not None for each in gone) == 0, "without waiting for the collector of cycles"


def test_what_is_told_below_nodes_that_are_gone_is_bounded():
    """Each message grows below the rejected sibling. The bound is what is told within twice as many tokens as a draft
    grows."""
    tree, most = SpeculationTree(max_depth=10), 0
    for _ in range(1000):
        first = tree.num_reported
        tree.add(new_nodes(first, (ROOT, 1, 0.5), (ROOT, 2, 0.4)))
        tree.reroot([1])
        below = first + 1
        tree.add(
            new_nodes(
                tree.num_reported,
                *((below if index == 0 else tree.num_reported + index - 1, 5, 0.5) for index in range(8)),
            )
        )
        most = max(most, num_unseen(tree))
    assert most == 2 * 8 * 10


@pytest.mark.parametrize("num_before", [0, 5, 11])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_what_was_told_early_is_there_until_nothing_of_it_can_follow(num_before, num_tokens):
    """A chain as deep as a draft grows, told at once and not looked at before: its end is there when it is wanted."""
    depth = 12
    tree = SpeculationTree(max_depth=depth)
    tree.reroot([77] * num_before)
    tree.add(new_nodes(0, *((place - 1, place, 1.0) for place in range(depth))))
    for end in range(num_tokens, depth + 1, num_tokens):
        tree.add(new_nodes(tree.num_reported, (ROOT, 99, 0.1)))
        assert foresees(tree, range(end - num_tokens, end))
        tree.reroot(range(end - num_tokens, end))


def num_unseen(tree):
    """Places of which the draft has told, and which nobody has looked at."""
    return sum(map(len, tree._unread.generations))
