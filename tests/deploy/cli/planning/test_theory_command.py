"""`outrider theory`: from arguments to a table, results and a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from core import theory as forms
from deploy.cli import main
from deploy.cli.planning.theory import TheoryOptions, figures, lines
from tests.deploy.cli.parsing import parsed

SVG = "{http://www.w3.org/2000/svg}"


def run(*argv: str) -> int:
    return main.main(["theory", *argv])


def figure(alpha: float, name: str, *argv: str) -> float:
    options = parsed(TheoryOptions, ["--alpha", f"{alpha}", *argv])
    return next(each for each in figures(options) if each.name == name).of(alpha)


def test_a_table_has_a_column_for_each_alpha_and_a_line_for_each_figure(capsys):
    assert run("--alpha", "0.5,0.7,0.9", "--c", "0.02", "--gamma", "5") == 0
    about, heading, *rows = capsys.readouterr().out.splitlines()
    assert "c = 0.02" in about
    assert heading.split() == ["alpha", "0.5", "0.7", "0.9"]
    assert len({len(row) for row in (heading, *rows)}) == 1, "columns stand below each other"
    tokens = next(row for row in rows if row.startswith("tokens a round"))
    assert tokens.split()[-3:] == ["1.97", "2.94", "4.69"]


def test_without_gamma_each_alpha_has_its_best():
    options = parsed(TheoryOptions, ["--alpha", "0,0.5,0.8", "--c", "0.12"])
    gamma = next(line for line in lines(options) if line.startswith("gamma"))
    assert gamma.split()[-3:] == ["0", "2", "5"]


def test_figures_are_the_closed_forms():
    given = ("--c", "0.2", "--gamma", "6", "--hit-rate", "0.5", "--drafts", "3", "--c-operations", "0.1")
    assert figure(0.8, "in turn", *given) == forms.walltime_factor(0.8, 6, 0.2)
    assert figure(0.8, "pipelined", *given) == forms.pipelined_factor(0.8, 6, 0.2, 0.5)
    assert figure(0.8, "operations a token", *given) == forms.operations_factor(0.8, 6, 0.1)
    assert figure(0.8, "memory accesses a token", *given) == forms.memory_factor(0.8, 6)
    assert figure(0.8, "guesses accepted of the best of 3 draft(s)", *given) == forms.expected_longest(0.8, 6, 3)
    assert figure(0.8, "in turn, at least (corollary 3.9)", *given) == pytest.approx(1.8 / 1.2)
    assert figure(0.8, "in turn, at most (oracle for gamma)", *given) == pytest.approx(1 / 0.36)
    best = figure(0.8, "in turn, best gamma", *given)
    assert figure(0.8, "in turn, at that", *given) == max(forms.walltime_factor(0.8, gamma, 0.2) for gamma in range(65))
    assert forms.walltime_factor(0.8, best, 0.2) == figure(0.8, "in turn, at that", *given)


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (("--alpha", "1.2", "--c", "0"), "--alpha"),
        (("--alpha", "0.5,nan", "--c", "0"), "--alpha"),
        (("--alpha", "0.5;0.6", "--c", "0"), "--alpha"),
        (("--alpha", "", "--c", "0"), "--alpha"),
        (("--alpha", "0.5"), "--c"),
        (("--alpha", "0.5", "--c", "-1"), "--c"),
        (("--alpha", "0.5", "--c", "0", "--gamma", "65"), "--gamma"),
        (("--alpha", "0.5", "--c", "0", "--gamma", "1.5"), "--gamma"),
        (("--alpha", "0.5", "--c", "0", "--hit-rate", "2"), "--hit-rate"),
        (("--alpha", "0.5", "--c", "0", "--drafts", "0"), "--drafts"),
        (("--alpha", "0.5", "--c", "0", "--c-operations", "-1"), "--c-operations"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_that_names_the_option(argv, option, capsys):
    assert run(*argv) == 2
    said = capsys.readouterr().err
    assert f"'{option}'" in said
    assert said.startswith("outrider: ")
    assert said.count("\n") == 1


def test_a_file_that_cannot_be_written_is_found_out_before_the_table(tmp_path, capsys):
    assert run("--alpha", "0.5", "--c", "0", "--svg", str(tmp_path / "nowhere" / "a.svg")) == 2
    out, err = capsys.readouterr()
    assert (out, "a.svg" in err) == ("", True)


def test_files_have_what_the_table_has(tmp_path):
    file, drawing = tmp_path / "figures.json", tmp_path / "figures.svg"
    assert run("--alpha", "0.7,0.9", "--c", "0.1", "--json", str(file), "--svg", str(drawing)) == 0
    results = json.loads(file.read_text())
    tokens = {each["settings"]["alpha"]: each["value"] for each in results if each["name"] == "in turn, at that"}
    assert tokens == pytest.approx({0.7: 1.98, 0.9: 3.43}, abs=0.01)
    root = ElementTree.parse(drawing).getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"in turn, times plain decoding", "pipelined, times plain decoding"} <= set(texts)
    assert texts.count("alpha 0.9") == 2
