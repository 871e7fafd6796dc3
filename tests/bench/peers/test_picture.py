"""The table and the picture have each side's speed in each case, and a gap where it was not asked."""

from __future__ import annotations

from pathlib import Path

from bench.peers.picture import draw, speeds_of, table
from bench.results import Result

RESULTS = [
    Result("ours: chat, 1 stream", 80.4, "tokens/s"),
    Result("transformers: chat, 1 stream", 11.0, "tokens/s"),
    Result("ours over transformers: chat, 1 stream", 7.3, "ratio"),
    Result("ours: chat and code, 4 streams", 240.0, "tokens/s"),
]


def test_a_table_has_a_line_a_side_and_a_column_a_case():
    assert table(speeds_of(RESULTS)).splitlines() == [
        "| tokens a second | chat, 1 stream | chat and code, 4 streams |",
        "| --- | --- | --- |",
        "| ours | 80 | 240 |",
        "| transformers | 11 |  |",
    ]


def test_the_picture_names_all_sides(tmp_path: Path):
    draw(speeds_of(RESULTS), tmp_path / "peers.svg")
    drawn = (tmp_path / "peers.svg").read_text()
    assert all(name in drawn for name in ("ours", "transformers", "chat and code, 4 streams"))
