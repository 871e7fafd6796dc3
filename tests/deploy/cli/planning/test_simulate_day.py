"""`outrider simulate --day`: the autoscaling of a configuration, through a day."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from deploy.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def test_a_day_is_told_drawn_and_written(tmp_path, capsys):
    plot, results = tmp_path / "day.svg", tmp_path / "day.json"
    assert main.main(["simulate", "--day", "200", "--plot", str(plot), "--json", str(results)]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in table[1:4]] == ["orchestrator", "draft", "target"]
    assert table[2][1:4] == ["0", "to", "13"]  # drafts are not kept for nobody
    written = {result["name"]: result["value"] for result in json.loads(results.read_text())}
    assert written["a day: target, changes taken back"] == int(table[3][-1])
    texts = [element.text for element in ElementTree.parse(plot).iter(f"{SVG}text")]
    assert {"sessions", "orchestrator replicas", "draft replicas", "target replicas", "h"} <= set(texts)


def test_the_day_goes_by_the_settings_of_a_file(tmp_path, capsys):
    settings = tmp_path / "service.yaml"
    settings.write_text("target: {engine: {model: t}, autoscaling: {min_replicas: 2, max_replicas: 3, sessions: 1}}")
    assert main.main(["simulate", "--day", "200", "--config", str(settings)]) == 0
    assert "2 to 3" in capsys.readouterr().out.splitlines()[3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--day", "0"), "'--day': must be in (0, 100000], got 0.0"),
        (("--day", "9", "--night", "2"), "'--night': must be in [0, 1], got 2.0"),
        (("--day", "9", "--session-kv", "0"), "'--session-kv': must be in (0, 1], got 0.0"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(options, message, capsys):
    assert main.main(["simulate", *options]) == 2
    assert message in capsys.readouterr().err
