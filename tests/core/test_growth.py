"""A tree grows as if each node had been asked for alone; what is held of it is what was fed and is still right."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from core.growth import Candidates, HeldTree, Sprout
from core.records import Base, DraftRequest, Stamp
from core.trees import NO_Q, NO_TOKEN, ROOT, Growth, SparseDistribution, TokenTree, subtree

NUM_RANKS = 6


def says(path):
    """What a make-believe model says after a path: other candidates, another draw, another sureness each time."""
    random = Random(repr(tuple(path)))
    ranked = tuple(random.sample(range(9), NUM_RANKS))
    q = SparseDistribution(ranked, (1 / NUM_RANKS,) * NUM_RANKS)
    return Candidates(ranked, random.random(), 3 * random.random(), random.choice(ranked), q)


def drawless(path):
    """The same where nothing was drawn, as it is kept of an earlier request."""
    return Candidates(says(path).ranked, says(path).confidence, says(path).entropy)


@st.composite
def requests(draw):
    """Any well-formed request: a block, or a table below one."""
    is_table = draw(st.booleans())
    tokens, parents = [], []
    for node in range(draw(st.integers(0, 5)) if is_table else 0):
        tokens.append(20 + node if draw(st.booleans()) else draw(st.integers(0, 8)))
        parents.append(draw(st.integers(ROOT, node - 1)))
        if (parents[-1], tokens[-1]) in zip(parents[:-1], tokens[:-1], strict=True):
            tokens[-1] = 20 + node
    block = TokenTree(tuple(tokens), tuple(parents))
    growth_parents, ranks, used = [], [], {}
    for index in range(draw(st.integers(0, 10))):
        parent = draw(st.integers(ROOT, len(block) + index - 1))
        used[parent] = used.get(parent, -1) + draw(st.integers(1, 2))
        growth_parents.append(parent)
        ranks.append(used[parent])
    growth = Growth(tuple(growth_parents), tuple(ranks))
    return DraftRequest(Stamp("s", 0, 1), Base(0, 0), (3,), growth, block, is_table)


def path_of(sprout, node):
    path = sprout.path(node)
    assert NO_TOKEN not in path, "what is fed has a token, and so has all that it sees"
    return path


def grow(request, samples, known=(), part=None, room=None):
    """Feed a sprout until it is done; the sprout, and the nodes of each pass."""
    sprout = Sprout(request, samples, {node: drawless(path(request.block, node)) for node in known})
    passes = []
    while not sprout.is_done:
        nodes = sprout.frontier()[:part]
        if room is not None and len(nodes) > room:
            sprout.drop(nodes[room:])
            nodes = nodes[:room]
            room = 0
        if nodes:
            passes.append(nodes)
            sprout.take({node: says(path_of(sprout, node)) for node in nodes})
    return sprout, passes


def flat(passes):
    return [node for nodes in passes for node in nodes]


def path(tree, node):
    return [] if node == ROOT else [*path(tree, tree.parents[node]), tree.tokens[node]]


def expected(request, samples):
    """Token and q of each node of the growth, one after the other, from the definition in `Growth`."""
    block, growth = request.block, request.growth
    paths = {node: path(block, node) for node in range(ROOT, len(block))}
    answer = []
    for index, (parent, rank) in enumerate(zip(growth.parents, growth.ranks, strict=True)):
        token, q = NO_TOKEN, NO_Q
        if parent in paths:
            candidates = says(paths[parent])
            is_outcome = request.is_table and parent < len(block)
            children = [block.tokens[n] for n in range(len(block)) if block.parents[n] == parent]
            free = [token for token in candidates.ranked if token not in children]
            if samples and not is_outcome:
                token, q = (candidates.sampled, candidates.q) if rank == 0 else (NO_TOKEN, NO_Q)
            elif rank < len(free):
                token = free[rank]
        if token != NO_TOKEN:
            paths[len(block) + index] = [*paths[parent], token]
        answer.append((token, q))
    return answer


@given(requests(), st.booleans())
def test_every_node_is_what_it_was_asked_to_be(request_, samples):
    sprout, _ = grow(request_, samples)
    tokens = sprout.tokens[len(request_.block) :]
    assert list(zip(tokens, sprout.q, strict=True)) == expected(request_, samples)
    for index, (token, parent) in enumerate(zip(tokens, request_.growth.parents, strict=True)):
        source = says(sprout.path(parent)) if token != NO_TOKEN else Candidates((), 0.0, 0.0)
        assert (sprout.confidence[index], sprout.entropy[index]) == (source.confidence, source.entropy)


@given(requests(), st.booleans())
def test_nothing_is_fed_twice_or_before_its_parent_or_for_nothing(request_, samples):
    sprout, passes = grow(request_, samples)
    fed = flat(passes)
    assert len(set(fed)) == len(fed)
    for place, node in enumerate(fed):
        assert node == ROOT or sprout.parent(node) in fed[:place]
    has_children = {p for node in range(len(sprout.tokens)) for p in [sprout.parent(node)]}
    assert set(fed) <= has_children | {ROOT}, "a leaf is not fed"
    depths = [sprout.depth(node) for node in fed if node >= len(request_.block)]
    assert len(passes) <= 1 + len({*depths}) if fed else not passes
    assert sprout.num_passes == len(passes)


@given(requests(), st.booleans(), st.data())
def test_what_is_known_saves_rows_and_changes_nothing(request_, samples, data):
    known = {ROOT} if (request_.is_table or not samples) and data.draw(st.booleans()) else set()
    for node, parent in enumerate(request_.block.parents):
        if parent in known and data.draw(st.booleans()):
            known.add(node)
    plain, passes = grow(request_, samples)
    saved, fewer = grow(request_, samples, known)
    assert (saved.tokens, saved.q, saved.confidence) == (plain.tokens, plain.q, plain.confidence)
    assert sorted(flat(fewer)) == sorted(set(flat(passes)) - known)


@given(requests(), st.booleans(), st.integers(1, 3))
def test_a_frontier_may_be_fed_in_parts(request_, samples, part):
    whole, _ = grow(request_, samples)
    parts, passes = grow(request_, samples, part=part)
    assert (parts.tokens, parts.q) == (whole.tokens, whole.q)
    assert all(len(nodes) <= part for nodes in passes)


@given(requests(), st.booleans(), st.integers(0, 4))
def test_where_there_is_no_room_nothing_grows_and_the_rest_is_as_it_was(request_, samples, room):
    whole, _ = grow(request_, samples)
    small, passes = grow(request_, samples, room=room)
    fed = set(flat(passes))
    for node in range(len(request_.block), len(small.tokens)):
        assert small.tokens[node] == (whole.tokens[node] if small.parent(node) in fed else NO_TOKEN)


def test_the_place_of_a_sample_counts_from_the_root_of_its_own_block():
    """In a block that is the depth; in a table, the depth below the outcome; outcomes themselves are not drawn."""
    stamp, base = Stamp("s", 0, 1), Base(0, 0)
    block = Sprout(DraftRequest(stamp, base, (3,), Growth.chain(3)), True, {})
    assert [block.place(node) for node in (ROOT, 0, 1, 2)] == [0, 1, 2, None]
    below = Growth((1, 2, 3, ROOT), (0, 0, 0, 0))
    table = Sprout(DraftRequest(stamp, base, (3,), below, TokenTree.chain([4, 5]), True), True, {})
    assert [table.place(node) for node in range(ROOT, 6)] == [None, None, None, 0, 1, None, None]
    assert [table.depth(node) for node in range(ROOT, 6)] == [0, 1, 2, 3, 4, 5, 1]
    coupled = Sprout(DraftRequest(stamp, base, (3,), Growth.chain(3)), False, {})
    assert {coupled.place(node) for node in (ROOT, 0, 1)} == {None}


def test_rank_0_is_the_likeliest_token_that_the_block_does_not_guess_already():
    first, second, third = says([]).ranked[:3]
    request = DraftRequest(
        Stamp("s", 0, 1), Base(0, 0), (3,), Growth((ROOT, ROOT), (0, 1)), TokenTree((second,), (ROOT,)), True
    )
    assert grow(request, samples=False)[0].tokens == [second, first, third]


def test_a_rank_that_no_candidate_has_stays_empty():
    request = DraftRequest(Stamp("s", 0, 1), Base(0, 0), (3,), Growth((ROOT, 0), (NUM_RANKS, 0)))
    assert grow(request, samples=False)[0].tokens == [NO_TOKEN, NO_TOKEN]


def test_without_growth_there_is_nothing_to_feed():
    request = DraftRequest(Stamp("s", 0, 1), Base(0, 0), (3,), block=TokenTree.chain([1]), is_table=True)
    assert Sprout(request, False, {}).is_done


# What is held


@st.composite
def held_trees(draw, max_size=10):
    tree = HeldTree(says([]))
    for _ in range(draw(st.integers(0, max_size))):
        parent, token = draw(st.integers(ROOT, len(tree) - 1)), draw(st.integers(0, 4))
        if tree.walk([*path(tree, parent), token])[len(path(tree, parent)) :] == []:
            tree.add(parent, token, says([*path(tree, parent), token]))
    return tree


@given(held_trees(), st.lists(st.integers(0, 4), max_size=5))
def test_a_walk_goes_as_far_as_there_are_nodes(tree, tokens):
    nodes = tree.walk(tokens)
    assert [tree.tokens[node] for node in nodes] == tokens[: len(nodes)]
    assert [tree.parents[node] for node in nodes] == [ROOT, *nodes[:-1]][: len(nodes)]
    held = {tuple(path(tree, node)) for node in range(len(tree))}
    assert tuple(tokens[: len(nodes) + 1]) not in held or len(nodes) == len(tokens)


@given(held_trees(), st.data())
def test_after_a_rebase_rows_nodes_and_candidates_still_belong_together(tree, data):
    """Rows of KV are named by the path of what was fed there; compaction keeps those that `rebase` names."""
    rows = [path(tree, node) for node in range(len(tree))]
    as_tree = TokenTree(tuple(tree.tokens), tuple(tree.parents))
    top = data.draw(st.integers(ROOT, len(tree) - 1))
    down = tree.walk(path(tree, top))
    below = subtree(as_tree, top)[0]
    block = below.prefix(data.draw(st.integers(0, len(below))))
    if data.draw(st.booleans()):  # and a node that is not held, with what hangs below it
        block = TokenTree((*block.tokens, 77, 1), (*block.parents, ROOT, len(block)))
    kept, nodes = tree.rebase(down, block)
    assert kept == sorted(kept), "compaction moves rows to the front"
    assert kept[: len(down)] == down
    left = [rows[row] for row in kept[len(down) :]]
    above = rows[top] if top != ROOT else []
    assert [above + path(tree, node) for node in range(len(tree))] == left
    assert tree.candidates == [says(p) for p in left]
    assert tree.root == says(above)
    assert {node: path(tree, held) for node, held in nodes.items()} == {
        node: path(block, node) for node in range(len(block)) if above + path(block, node) in rows
    }
    assert len(tree) == len(nodes), "what the block does not name is gone"


def test_cleared_is_cleared():
    tree = HeldTree(says([]))
    tree.add(ROOT, 4, says([4]))
    tree.clear()
    assert (len(tree), tree.root, tree.walk([4])) == (0, None, [])
    assert tree.add(ROOT, 5, says([5])) == 0
    assert tree.walk([5]) == [0]
