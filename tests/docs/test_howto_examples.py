"""What pages of docs/howto have readers write does what they say; the backend's is tested beside the backends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.config import SpeculationConfig
from core.speculation import Guesses
from orchestrator.guessers import registry
from tests.docs.pages import python_blocks

MEANS = registry.Means(SpeculationConfig(), max_depth=1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_the_guesser_answers_soundly_under_its_line_in_the_table(text):
    code, line = python_blocks("howto/add-a-guesser.md")
    names = dict(vars(registry))
    exec(code, names)
    found = eval(f"{{{line}}}", names)["repetition"](MEANS).propose(text)
    found.check(vocab_size=6)
    assert found == Guesses.chain(text[-1:], (1.0,))
