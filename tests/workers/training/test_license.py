"""A head has its target's licence, as far as that can be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.training.license import license_of

APACHE = Path(__file__).parents[3] / "LICENSE"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "unknown"),
        ({"README.md": "---\ntags: [x]\nlicense: llama3.1\n---\n# A model"}, "llama3.1"),
        ({"README.md": "---\nlicense: 'mit'\n---\n", "LICENSE": APACHE.read_text()}, "mit"),
        ({"README.md": "# A model\nlicense: mit\n", "LICENSE": APACHE.read_text()}, "apache-2.0"),
        ({"README.md": "---\nlicense:\n- mit\ntags: [x]\n---\n"}, "unknown"),
        ({"README.md": "---\nlicense:\nlibrary_name: x\n---\n"}, "unknown"),
        ({"LICENSE.txt": "MIT License\n\nCopyright"}, "mit"),
        ({"LICENSE": "A licence of our own, unlike the Apache License"}, "unknown"),
    ],
)
def test_it_is_the_cards_or_that_of_a_known_text(files: dict[str, str], found: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert license_of(tmp_path) == found
