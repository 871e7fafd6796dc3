from __future__ import annotations

import json
from collections import defaultdict
from xml.etree import ElementTree

import pytest

from deploy.trace import export, picture
from deploy.trace.timeline import Stream, timeline
from tests.deploy.trace.traces import STREAM, chunk, prefill

CHROME_COLORS = {"generic_work", "white", "rail_load", "grey", "yellow", "olive", "good", "terrible"}
"""Colours in trace-viewer's color_scheme; others are shown in an arbitrary colour."""
STREAMS = [STREAM, Stream("second & <last>", 1.005, STREAM.chunks)]


@pytest.fixture(scope="module")
def written():
    """The file's events, read like a viewer reads them."""
    return json.loads(json.dumps(export.chrome_trace(timeline(STREAMS))))


def events(written, *phases):
    return [event for event in written["traceEvents"] if event["ph"] in phases]


def span_ns(event):
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def test_every_event_is_complete(written):
    needed = {
        "M": {"name", "args"},
        "X": {"name", "cat", "dur", "args", "cname"},
        "s": {"id", "name", "cat"},
        "f": {"id", "name", "cat", "bp"},
    }
    assert {event["ph"] for event in written["traceEvents"]} == set(needed)
    for event in written["traceEvents"]:
        assert set(event) == {"ph", "ts", "pid", "tid"} | needed[event["ph"]]
        assert event["ts"] >= 0 <= event.get("dur", 0)
    assert {event["cname"] for event in events(written, "X")} == CHROME_COLORS


def test_times_are_in_microseconds_from_the_begin_of_the_first_stream(written):
    prefills = [
        (event["pid"], event["ts"], event["dur"]) for event in events(written, "X") if event["name"] == "prefill"
    ]
    assert prefills == [(1, 2_000, 10_000), (2, 7_000, 10_000)]


def test_events_are_in_order_of_time_names_first(written):
    times = [event["ts"] for event in written["traceEvents"]]
    assert times == sorted(times)
    phases = [event["ph"] for event in written["traceEvents"]]
    assert "M" not in phases[phases.index("X") :]


def test_every_track_has_a_name_and_every_stream_its_own(written):
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events(written, "M")
        if event["name"] == "thread_name"
    }
    assert {(event["pid"], event["tid"]) for event in events(written, "X")} == set(names)
    for pid in (1, 2):
        assert [name for (other, _), name in sorted(names.items()) if other == pid] == [
            "orchestrator",
            "target",
            "draft",
        ]
    processes = [event["args"]["name"] for event in events(written, "M") if event["name"] == "process_name"]
    assert processes == ["stream 1: def f():", "stream 2: second & <last>"]


def test_slices_of_a_thread_nest_as_a_viewer_stacks_them(written):
    threads = defaultdict(list)
    for event in events(written, "X"):
        threads[event["pid"], event["tid"]].append(span_ns(event))
    assert len(threads) == 6
    for slices in threads.values():
        open_until = []
        for start, end in slices:  # in the file's order: parents come first
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_each_arrow_begins_and_ends_in_a_slice(written):
    begins, ends = ({event["id"]: event for event in events(written, phase)} for phase in "sf")
    assert len(begins) == len(events(written, "s")) == 4
    assert set(begins) == set(ends)
    for number, begin in begins.items():
        assert begin["ts"] < ends[number]["ts"]
        assert begin["pid"] == ends[number]["pid"]
    for event in (*begins.values(), *ends.values()):
        at = round(event["ts"] * 1000)
        around = [
            other
            for other in events(written, "X")
            if (other["pid"], other["tid"]) == (event["pid"], event["tid"])
            and span_ns(other)[0] <= at < span_ns(other)[1]
        ]
        assert around, event


def test_accepted_and_wasted_work_can_be_told_apart(written):
    target = [event for event in events(written, "X") if (event["pid"], event["tid"]) == (1, 101)]
    assert [event["name"] for event in target if event["cname"] == "good"][1] == "kept 3 of 5 rows"
    assert [event["name"] for event in target if event["cname"] == "terrible"] == ["wasted 2 of 5 rows"]
    verdict = next(event for event in target if event["name"] == "verify: 2 of 4 accepted")
    assert verdict["args"] == {
        "guesses": 4,
        "used": 2,
        "waited_ms": 1.0,
        "computed_ms": 7.0,
        "passes": 1,
        "rows with company": 5,
    }


def test_an_empty_timeline_is_a_trace_and_a_picture(tmp_path):
    assert export.chrome_trace(timeline([]))["traceEvents"] == []
    texts(timeline([]), tmp_path / "empty.svg")


# The picture


def texts(shown, file):
    picture.draw(shown, file)
    return [text.text for text in ElementTree.parse(file).findall(".//{*}text")]


def test_labels_say_the_text_that_a_round_gave_and_each_stream_has_its_tracks(tmp_path):
    found = texts(timeline(STREAMS), tmp_path / "streams.svg")
    assert found.count("b c d") == 2
    assert {"def f():", "second & <last>", "kept", "wasted"} <= set(found)
    assert found.count("target") == found.count("draft") == 2


def test_what_is_no_character_of_xml_or_looks_like_mathematics_does_not_break_the_picture(tmp_path):
    for number, text in enumerate(("\x00\n<b>\ufffe", "$\\frac$ and $", "汉字")):
        shown = timeline([Stream("$s$", 0.0, [chunk(text, 1, prefill(0, 9))])])
        assert repr(text)[1:-1] in texts(shown, tmp_path / f"{number}.svg")


# The file


def test_the_name_of_the_file_says_what_is_written(tmp_path):
    export.write(tmp_path / "trace.json", STREAMS)
    export.write(tmp_path / "trace.svg", STREAMS)
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"
    assert ElementTree.parse(tmp_path / "trace.svg").getroot().tag.endswith("svg")
