"""The examples of the client's README run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.story import Story
from tests.deploy.grpc.rpc import ids_of, server

README = Path(__file__).parents[2] / "clients" / "python" / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SAID = ids_of("def main(argv):\n    return 0\n naïve café")
PRINTS = ["stop", "(", "sampling.temperature", "pair"]
"""In the output of each example."""


@pytest.mark.parametrize(("example", "printed"), list(zip(EXAMPLES, PRINTS, strict=True)), ids=PRINTS)
def test_an_example_runs(example, printed, capsys):
    story = Story([*SAID, 1])
    with server(story) as address:
        exec(compile(example.replace("localhost:9000", address), "README.md", "exec"), {"__name__": "__main__"})
    assert printed in capsys.readouterr().out
