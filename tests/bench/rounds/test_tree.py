"""The picture in docs/rounds.md: drawn from what was recorded of three rounds of the demo pair."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.rounds import tree
from bench.rounds.tree_picture import MOST_NODES, DrawnRound, draw
from bench.rounds.tree_trace import SeenNode, SeenRound, read, written

TRACE = Path(__file__).with_name("tree_trace.json")
DRAWN = Path(__file__).parents[3] / "docs" / "tree.svg"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def rounds():
    return read(TRACE.read_text())


def texts(file):
    return [text.text for text in ElementTree.parse(file).iter(f"{SVG}text")]


def kinds(row):
    return Counter(map(row.style_of, row.shown))


def test_a_record_is_read_as_it_was_written(rounds):
    assert read(written(rounds)) == rounds


def test_each_round_has_its_block_its_path_and_what_is_kept(rounds):
    assert len(rounds) == tree.ROUNDS
    for row, seen in zip([DrawnRound(1, seen) for seen in rounds], rounds, strict=True):
        assert [seen.nodes[node].is_in_block for node in row.shown].count(True) == seen.num_in_block
        assert kinds(row)["path"] == len(seen.path)
        assert kinds(row)["own"] == (seen.next_node is not None) != (row.own_place is not None)
        assert len(row.shown) <= MOST_NODES
        assert (kinds(row)["kept"] > 0) == (seen.num_kept > 0)


def test_no_two_nodes_share_a_place(rounds):
    for row in [DrawnRound(1, seen) for seen in rounds]:
        assert len({*row.places.values(), row.own_place}) == len(row.places) + 1


def test_the_accepted_path_is_a_path_of_the_block(rounds):
    for seen in rounds:
        assert [seen.nodes[node].parent for node in seen.path] == [-1, *seen.path[:-1]]
        assert all(seen.nodes[node].is_in_block for node in seen.path)


def test_the_next_round_begins_where_the_verdict_ended_with_what_was_kept(rounds):
    """Of the tree that a verdict leaves behind each node is there still; the draft has only added to it."""
    for before, after in pairwise(rounds):
        assert after.root == before.next_text
        assert after.num_nodes >= before.num_kept
        kept = {node.text for node in before.nodes if node.is_drafted and node.parent == before.next_node}
        assert kept <= {node.text for node in after.nodes if node.parent == -1}


def test_a_token_that_the_tree_does_not_have_is_drawn_behind_the_path(tmp_path):
    nodes = (SeenNode("a", -1, 0.9, is_drafted=True, is_in_block=True),)
    seen = SeenRound("r", nodes, (0,), "<z>", None, 1, 0)
    draw([seen], tmp_path / "tree.svg")
    assert "<z>" in texts(tmp_path / "tree.svg")
    row = DrawnRound(1, seen)
    assert row.own_place[0] > row.places[0][0]
    assert "A miss: none of 1 nodes kept" in row.title


def test_of_many_nodes_the_likeliest_are_drawn():
    nodes = tuple(SeenNode(f"n{n}", -1, 0.5 / (n + 1), is_drafted=n % 2 == 0, is_in_block=False) for n in range(60))
    row = DrawnRound(1, SeenRound("r", nodes, (), "n0", 0, 60, 0))
    assert row.shown == [*range(MOST_NODES)]
    assert f"({60 - MOST_NODES} less likely ones are not drawn)" in row.title


def test_a_recorded_trace_needs_no_models_and_gives_the_picture_in_the_documents(tmp_path, rounds):
    parser = ArgumentParser()
    tree.add_arguments(parser)
    results = tree.measure(parser.parse_args(["--from-trace", str(TRACE), "--svg", str(tmp_path / "tree.svg")]))
    assert texts(tmp_path / "tree.svg") == texts(DRAWN)
    assert [result.value for result in results] == [seen.num_nodes for seen in rounds]


@pytest.mark.ci
@pytest.mark.thorough
def test_what_is_recorded_of_a_real_stream_is_what_came_out():
    found = asyncio.run(tree.watched(tree.PROMPT, seed=1))
    assert len(found) > tree.ROUNDS
    for before, after in pairwise(found):
        assert after.root == before.next_text
        assert before.num_kept <= before.num_nodes
