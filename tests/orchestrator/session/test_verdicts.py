"""Extra fields of a verdict are believed only if they can be about the block."""

import pytest

from core.records import Stamp, Verdict
from core.speculation.token_tree import TokenTree
from orchestrator.session.verdicts import problem_of

BLOCK = TokenTree.chain([3, 4])


@pytest.mark.parametrize("samples", [(), (3, 9, 0), (3, 4, 49)])
def test_samples_of_the_block_or_none(samples):
    assert problem_of(Verdict(Stamp("s", 1, 1), (0,), 9, 1, samples=samples), BLOCK, 5, 50) is None


@pytest.mark.parametrize("samples", [(3,), (3, 9), (3, 9, 0, 0), (3, 9, 50), (-1, 9, 0)])
def test_samples_that_cannot_be_of_the_block(samples):
    found = problem_of(Verdict(Stamp("s", 1, 1), (0,), 9, 1, samples=samples), BLOCK, 5, 50)
    assert found == "its samples are not those of the block"


@pytest.mark.parametrize(("num_cached", "is_possible"), [(0, True), (5, True), (6, False), (-1, False)])
def test_no_more_is_taken_from_a_cache_than_there_was_to_compute(num_cached, is_possible):
    found = problem_of(Verdict(Stamp("s", 1, 1), (0,), 9, 1, num_cached=num_cached), BLOCK, 5, 50)
    assert (found is None) == is_possible
