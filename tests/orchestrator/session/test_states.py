"""The tables: every state can end, nothing leaves the end, and the documents show what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.session.states import GROWING_TABLE, TARGET_TABLE, Growing, Machine, Target, Trigger
from tests.orchestrator.session.state_diagram import diagram


@pytest.mark.parametrize(("table", "states"), [(TARGET_TABLE, Target), (GROWING_TABLE, Growing)])
def test_every_state_is_in_its_table_and_can_end(table, states):
    assert set(table) == set(states)
    for state in states:
        assert (Trigger.END in table[state]) == (state is not states.CLOSED)


@pytest.mark.parametrize(("table", "start"), [(TARGET_TABLE, Target.NOT_LEASED), (GROWING_TABLE, Growing.ABSENT)])
def test_every_state_can_be_reached(table, start):
    reached, frontier = {start}, [start]
    while frontier:
        new = set(table[frontier.pop()].values()) - reached
        reached |= new
        frontier += new
    assert reached == set(table)


def test_a_machine_refuses_what_its_table_lacks_and_stays_where_it_is():
    machine = Machine(TARGET_TABLE, Target.NOT_LEASED)
    with pytest.raises(AssertionError, match=r"not leased.*verdict"):
        machine.fire(Trigger.VERDICT)
    assert machine.state is Target.NOT_LEASED


def test_the_diagram_in_the_documents_is_drawn_from_the_tables():
    document = Path(__file__).parents[3] / "docs" / "states.md"
    assert diagram() in document.read_text()
