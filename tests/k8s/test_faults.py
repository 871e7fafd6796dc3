"""Each check finds what it is there for: one planted fault at a time, in a composition with all that matters."""

from __future__ import annotations

import pytest

from tests.k8s.compositions import objects
from tests.k8s.faults import FAULTS, Fault
from tests.k8s.test_manifests import CHECKS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_is_found_by_its_check(fault: Fault) -> None:
    changed = objects(fault.composition)
    assert not list(CHECKS[fault.check](changed)), "the check complains about what is right"
    fault.change(changed)
    assert list(CHECKS[fault.check](changed)), f"{fault.check} did not notice: {fault.what}"


def test_every_check_has_a_fault() -> None:
    assert {fault.check for fault in FAULTS} == set(CHECKS)


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)
