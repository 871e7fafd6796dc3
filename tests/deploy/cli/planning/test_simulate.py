"""`outrider simulate`: from arguments to a scenario, and from a comparison to a table, a sentence and a picture."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from core.errors import ConfigError
from core.records import Verification
from deploy.cli import main
from deploy.cli.planning.simulate import MIN_STREAMS, Preset, SimulateOptions, by_streams, scenario_of
from simulation.chaos.corruptions import DRAFT_CORRUPTIONS, TARGET_CORRUPTIONS
from simulation.engines.hardware import PRESETS
from simulation.report import draw_speed, table
from simulation.report.comparison import compare
from simulation.scenario import Arrivals, Closed
from tests.deploy.cli.parsing import parsed
from tests.simulation.chaos.test_mutations import PLANTED

QUICK = ("--tokens", "24", "--prompt-tokens", "8", "--acceptance", "0.8")


def scenario(*argv):
    return scenario_of(parsed(SimulateOptions, argv))


@pytest.fixture(scope="module")
def quick():
    described = replace(scenario(*QUICK, "--temperature", "1"), load=Closed(1, 4))
    return described, compare(described, gammas=(1, 4))


def with_rates(comparison, plain, in_turn, pipelined):
    """The same comparison, but for its speeds."""

    def paced(run, rate):
        return replace(run, report=replace(run.report, tokens_per_s_a_stream=rate))

    return replace(
        comparison,
        plain=paced(comparison.plain, plain),
        sequential=(paced(comparison.best_sequential, in_turn),),
        pipelined=paced(comparison.pipelined, pipelined),
    )


def test_without_arguments_it_is_one_greedy_stream_of_the_demo_pair_on_large_hardware():
    described = scenario()
    assert described.hardware == PRESETS["70b+1b"]
    assert (described.law, described.temperature, described.verification) == (None, 0.0, Verification.COUPLED)
    assert described.load == Closed(1, MIN_STREAMS)
    assert described.speculation.guessers == ("draft",), "its texts repeat nothing that could be looked up"


def test_what_is_said_of_the_hardware_goes_before_the_preset():
    hardware = scenario("--preset", "far-draft", "--verify-ms", "40", "--draft-ms", "2", "--draft-rows", "16").hardware
    assert hardware.target.pass_s(1) == 0.040
    assert (hardware.draft.pass_s(16), hardware.draft.pass_s(32)) == (0.002, 0.004)
    assert hardware.draft_hop == PRESETS["far-draft"].draft_hop
    assert scenario("--draft-rows", "16").hardware.draft.pass_s(32) == pytest.approx(0.006), (
        "3 ms, as the preset has it"
    )
    assert scenario("--preset", "far-draft", "--hop-ms", "2").hardware.draft_hop.round_trip_s == 0.002


def test_every_option_reaches_the_scenario():
    hardware, load = "--targets 2 --drafts 3", "--prompt-tokens 9 --tokens 50 --streams 20"
    how = "--temperature 1 --verification block --policy static --gamma 5 --seed 7 --acceptance 0.6"
    described = scenario(*hardware.split(), *load.split(), *how.split())
    assert (described.num_targets, described.num_drafts, described.seed) == (2, 3, 7)
    assert (described.temperature, described.verification) == (1.0, Verification.BLOCK)
    assert (described.prompt_tokens, described.max_tokens, described.load) == (9, 50, Closed(20, 40))
    assert (described.speculation.policy, described.speculation.max_draft_tokens) == ("static", 5)
    assert described.law.shares[0] == 0.6
    assert scenario("--arrivals", "4").load == Arrivals(((10.0, 4.0),))


@pytest.mark.parametrize(
    "argv",
    [
        ("--verify-ms", "0"),
        ("--draft-ms", "-1"),
        ("--draft-rows", "0"),
        ("--hop-ms", "-1"),
        ("--targets", "0"),
        ("--drafts", "0"),
        ("--acceptance", "1.2"),
        ("--acceptance", "nan"),
        ("--temperature", "-1"),
        ("--temperature", "0.5"),
        ("--prompt-tokens", "0"),
        ("--tokens", "1"),
        ("--streams", "0"),
        ("--arrivals", "0"),
        ("--gamma", "0"),
        ("--preset", "h100"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_that_names_the_option(argv, capsys):
    assert main.main(["simulate", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith((f"outrider: Invalid value for '{argv[0]}': ", f"outrider: {argv[0]} "))
    assert said.count("\n") == 1


def test_streams_and_arrivals_exclude_each_other():
    with pytest.raises(ConfigError, match="--streams and --arrivals"):
        scenario("--streams", "2", "--arrivals", "3")


def test_every_preset_can_be_named():
    assert get_args(Preset) == tuple(PRESETS)


def test_a_temperature_that_was_not_recorded_needs_an_acceptance():
    assert scenario("--temperature", "0.5", "--acceptance", "0.7").temperature == 0.5
    with pytest.raises(ConfigError, match="--acceptance"):
        scenario("--temperature", "0.5")


def test_a_file_that_cannot_be_written_is_found_out_before_the_work(tmp_path, capsys):
    assert main.main(["simulate", "--json", str(tmp_path / "nowhere" / "a.json")]) == 2
    assert "a.json" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_whole_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deploy.cli.planning.simulate.PLOT_STREAMS", (1, 2))
    file, picture = tmp_path / "figures.json", tmp_path / "figures.svg"
    assert main.main(["simulate", *QUICK, "--json", str(file), "--plot", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"simulated in \d+ s\n", err), "there is no terminal for a spinner"
    assert "in turn (coupled, gamma" in out
    assert "Draft behind verification" in out
    results = json.loads(file.read_text())
    assert all(set(each) == {"name", "value", "unit", "goal", "met", "settings"} for each in results)
    over_plain = next(each for each in results if each["name"] == "pipelined over plain")
    assert over_plain["value"] > 2
    assert over_plain["settings"]["acceptance"] == 0.8
    ElementTree.parse(picture)


def test_the_table_has_every_figure_of_every_way(quick):
    _, comparison = quick
    heading, *rows = table.comparison_lines(comparison)
    assert heading.split()[0] == "plain"
    assert len(rows) == len(table.FIGURES)
    assert len({len(row) for row in (heading, *rows)}) == 1, "columns stand below each other"
    first = next(row for row in rows if row.startswith("first token after, p50"))
    assert f"{1e3 * comparison.pipelined.report.ttft_s.p50:.1f}" == first.split()[-1]


def test_the_advice_is_the_fastest_way(quick):
    _, comparison = quick
    say = table.advice_of
    assert say(with_rates(comparison, 40, 40.5, 30)).startswith("Decode plainly: drafting gains nothing here (1.01x")
    in_turn = say(with_rates(comparison, 40, 80, 60))
    assert in_turn.startswith("Draft and verify in turn")
    assert "2.00x of plain, 1.33x of drafting behind" in in_turn
    pipelined = say(with_rates(comparison, 40, 80, 120))
    assert pipelined.startswith("Draft behind verification: 3.00x of plain, 1.50x of the best in turn")


def test_results_have_all_that_was_tried(quick):
    _, comparison = quick
    results = table.comparison_results(comparison, {"streams": 1})
    tried = [each for each in results if each.name.startswith("tried in turn")]
    assert {(each.settings["gamma"], each.settings["verification"]) for each in tried} == {
        (run.gamma, run.verification.value) for run in comparison.sequential
    }
    names = [each.name for each in results if not each.name.startswith("tried in turn")]
    assert len(set(names)) == len(names)
    assert all(each.settings["streams"] == 1 for each in results)


def drawn(comparison, streams):
    """The lines of both axes, by name."""
    axes = Figure().subplots(1, 2)
    draw_speed(axes, comparison, streams)
    return [{line.get_label(): line for line in each.lines} for each in axes]


@pytest.mark.ci
def test_the_picture_shows_what_was_measured(quick):
    described, comparison = quick
    streams = by_streams(described, comparison)
    one, several = drawn(comparison, streams)
    assert {"plain", "pipelined", "in turn, coupled", "in turn, rejection", "in turn, block"} <= set(one)
    for name, line in one.items():
        runs = [run for run in comparison.sequential if name == f"in turn, {run.verification.value}"]
        assert [*line.get_ydata()] == [run.rate for run in runs] or not runs
    assert set(several) == {"plain", "in turn", "pipelined"}
    assert [*several["pipelined"].get_ydata()] == [rate for _, rate in streams["pipelined"]]


def test_numbers_of_streams_stand_at_equal_distances(quick):
    _, comparison = quick
    flat = {"plain": [(1, 50.0), (2, 100.0), (4, 100.0)], "pipelined": [(1, 200.0), (4, 400.0)]}
    _, lines = drawn(with_rates(comparison, 40, 50, 60), flat)
    assert [[*lines[name].get_xdata()] for name in flat] == [[0, 1, 2], [0, 2]]


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    assert main.main(["simulate", "--plot", str(tmp_path / "speed.jpeg")]) == 2
    assert "speed.jpeg: the name of a picture ends in .svg, .png, .pdf" in capsys.readouterr().err
    monkeypatch.setattr("simulation.report.pictures.find_spec", lambda _: None)
    assert main.main(["simulate", "--plot", str(tmp_path / "speed.svg")]) == 2
    assert "without matplotlib: pip install 'outrider[pictures]'" in capsys.readouterr().err


def test_the_essay_names_every_preset_and_count():
    essay = (Path(__file__).parents[4] / "docs" / "simulation.md").read_text()
    assert all(f"| `{name}` |" in essay for name in PRESETS)
    assert f"{len(DRAFT_CORRUPTIONS)} corruptions\n  of a draft, {len(TARGET_CORRUPTIONS)} of a target" in essay
    assert f"plants {len(PLANTED)} faults" in essay
