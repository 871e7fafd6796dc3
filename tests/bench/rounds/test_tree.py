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
from bench.rounds.tree_svg import MOST_NODES, picture
from bench.rounds.tree_trace import SeenNode, SeenRound, read, written

TRACE = Path(__file__).with_name("tree_trace.json")
DRAWN = Path(__file__).parents[3] / "docs" / "tree.svg"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def rounds():
    return read(TRACE.read_text())


def rows(svg):
    return [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.get("class") == "round"]


def kinds(row, shape):
    return Counter(kind for each in row.iter(f"{SVG}{shape}") for kind in each.get("class", "").split()[1:])


def test_the_picture_in_the_documents_is_that_of_the_recorded_trace(rounds):
    assert DRAWN.read_text() == picture(rounds)


def test_a_record_is_read_as_it_was_written(rounds):
    assert read(written(rounds)) == rounds


def test_each_round_is_a_row_with_its_block_its_path_and_what_is_kept(rounds):
    drawn = rows(picture(rounds))
    assert len(drawn) == len(rounds) == tree.ROUNDS
    for row, seen in zip(drawn, rounds, strict=True):
        nodes, edges = kinds(row, "rect"), kinds(row, "path")
        assert nodes["root"] == 1
        assert nodes["block"] == seen.num_in_block
        assert nodes["path"] == edges["path"] == len(seen.path)
        assert nodes["own"] == edges["own"] == 1, "the target's own token"
        assert nodes.total() - nodes["block"] - 1 <= MOST_NODES + 1
        assert (nodes["kept"] > 0) == (seen.num_kept > 0)


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


def test_a_token_that_the_tree_does_not_have_is_drawn_behind_the_path():
    nodes = (SeenNode("a", -1, 0.9, is_drafted=True, is_in_block=True),)
    [row] = rows(picture([SeenRound("r", nodes, (0,), "<z>", None, 1, 0)]))
    labels = [text.text for text in row.iter(f"{SVG}text")]
    assert "<z>" in labels
    assert "A miss: none of 1 nodes kept" in labels[0]
    assert kinds(row, "rect")["pruned"] == 0


def test_of_many_nodes_the_likeliest_are_drawn():
    nodes = tuple(SeenNode(f"n{n}", -1, 0.5 / (n + 1), is_drafted=n % 2 == 0, is_in_block=False) for n in range(60))
    [row] = rows(picture([SeenRound("r", nodes, (), "n0", 0, 60, 0)]))
    labels = [text.text for text in row.iter(f"{SVG}text")]
    assert f"n{MOST_NODES - 1}" in labels
    assert f"n{MOST_NODES}" not in labels
    assert f"({60 - MOST_NODES} less likely ones are not drawn)" in labels[0]


def test_a_recorded_trace_needs_no_models(tmp_path, rounds):
    parser = ArgumentParser()
    tree.add_arguments(parser)
    results = tree.measure(parser.parse_args(["--from-trace", str(TRACE), "--svg", str(tmp_path / "tree.svg")]))
    assert (tmp_path / "tree.svg").read_text() == DRAWN.read_text()
    assert [result.value for result in results] == [seen.num_nodes for seen in rounds]


@pytest.mark.ci
@pytest.mark.thorough
def test_what_is_recorded_of_a_real_stream_is_what_came_out():
    found = asyncio.run(tree.watched(tree.PROMPT, seed=1))
    assert len(found) > tree.ROUNDS
    for before, after in pairwise(found):
        assert after.root == before.next_text
        assert before.num_kept <= before.num_nodes
