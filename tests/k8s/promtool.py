"""Prometheus' own judgement of alerting rules: promtool, on the rules that an overlay has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from tests.k8s.manifests import Manifest, Objects, of_kind

FETCHED = Path(sys.prefix) / "bin" / "promtool"
"""Where `make k8s` puts it."""
SKIP_VARIABLE = "OUTRIDER_WITHOUT_PROMTOOL"
RULES = "rules.yaml"
"""As case files call the rules, which stand beside them."""


def complaints(rules: Objects, cases: Sequence[Path]) -> str:
    """promtool's complaints about the rules' form, or about their results in the cases; none if all is well."""
    tool = find_promtool()
    with TemporaryDirectory(prefix="outrider-alerts-") as directory:
        here = Path(directory)
        groups = [group for item in of_kind(rules, "PrometheusRule") for group in item["spec"]["groups"]]
        (here / RULES).write_text(yaml.safe_dump({"groups": [_as_cases_have_them(group) for group in groups]}))
        for case in cases:
            shutil.copy(case, here)
        commands = [["check", "rules", RULES], ["test", "rules", *(case.name for case in cases)]]
        for command in commands:
            done = subprocess.run([tool, *command], cwd=here, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                return done.stdout + done.stderr
    return ""


def _as_cases_have_them(group: Manifest) -> Manifest:
    """Without `runbook_url`, which monitoring_policies holds to the alert's name, so that no case has to repeat it."""
    rules = [
        {**rule, "annotations": {key: value for key, value in rule["annotations"].items() if key != "runbook_url"}}
        for rule in group["rules"]
    ]
    return {**group, "rules": rules}


def find_promtool() -> str:
    """Its path.

    Where it is not, but can be had, tests fail: a skipped check looks like a passed one. They are skipped, with the
    reason in pytest's summary, where there is no way to fetch it, and for who says so by OUTRIDER_WITHOUT_PROMTOOL.
    """
    found = str(FETCHED) if FETCHED.exists() else shutil.which("promtool")
    if found is not None:
        return found
    if os.environ.get(SKIP_VARIABLE):
        pytest.skip(f"promtool is not there, and {SKIP_VARIABLE} is set: the alerts were NOT tried")
    if shutil.which("apt-get") is None:
        pytest.skip("promtool is not installed, and there is no apt-get to fetch it with: the alerts were NOT tried")
    pytest.fail(f"promtool is needed to try the alerts; make k8s fetches it, or set {SKIP_VARIABLE}=1 to go without")
