"""docs/quickstart.md: what it says runs as it stands, in its order, on the service that tests share."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
STARTS, CALLS = BLOCKS[:2], BLOCKS[2:]
PRINTS = [
    "target passes",
    "<title>Outrider</title>",
    "tokens were guessed",
    "openai:",
    "data: [DONE]",
    r"\"age\"",
    "batch:",
    "(TTFT)",
    "servable",
]
"""In what each call of the page prints."""
COMMAND = """
outrider() {
    case $1 in generate | bench) set -- "$@" --address ADDRESS ;; esac
    command outrider "$@"
}
"""
"""`outrider` in a terminal, but for the port of the server."""


def test_the_page_begins_with_what_the_makefile_has():
    assert [kind for kind, _ in STARTS] == ["sh", "sh"]
    targets = set(re.findall(r"^make (\S+)", STARTS[0][1], re.MULTILINE))
    assert targets == {"setup", "serve"}
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert STARTS[1][1] == ". .venv/bin/activate\n"


def test_every_block_is_run():
    assert len(CALLS) == len(PRINTS)
    assert PAGE.count("\n```") == 2 * len(BLOCKS), "a block of another kind would not be run"


@pytest.mark.ray
@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("block", "printed"), list(zip(CALLS, PRINTS, strict=True)), ids=PRINTS)
def test_a_block_runs(running, cluster, monkeypatch, capfd, block, printed):
    kind, code = block
    code = code.replace("localhost:9000", running.address).replace("localhost:8000", f"localhost:{cluster.http_port}")
    monkeypatch.chdir(ROOT)
    if kind == "python":
        exec(compile(code, "docs/quickstart.md", "exec"), {"__name__": "__main__"})
    else:
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        shell = f"set -euo pipefail\n{COMMAND.replace('ADDRESS', running.address)}\n{code}"
        subprocess.run(["bash", "-c", shell], check=True, stdin=subprocess.DEVNULL, timeout=120)
    assert printed in "".join(capfd.readouterr())
