"""Examples in docs/howto do what their pages say; the backend's is tested beside the backends."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from core.config import SpeculationConfig
from core.speculation import Guesses
from deploy.metrics import instruments
from orchestrator.guessers import registry
from tests.docs.pages import DOCS, python_blocks

ROW = re.compile(r"^ *\| `(\w+)` \| (\w+) \| (.*) \|$", re.MULTILINE)
INPUTS = registry.GuesserInputs(SpeculationConfig(), max_depth=1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_the_guesser_answers_soundly_under_its_line_in_the_table(text):
    code, line = python_blocks("howto/add-a-guesser.md")
    names = dict(vars(registry))
    exec(code, names)
    found = eval(f"{{{line}}}", names)["repetition"](INPUTS).propose(text)
    found.check(vocab_size=6)
    assert found == Guesses.chain(text[-1:], (1.0,))


def test_the_metric_can_be_declared_and_is_that_of_its_row():
    declared, _ = python_blocks("howto/add-a-metric.md")
    names = dict(vars(instruments))
    exec(declared, names)
    metric = names["CHUNKS"]
    assert ROW.findall((DOCS / "howto/add-a-metric.md").read_text()) == [(metric.name, metric.kind, metric.description)]
