"""Makes the pictures of docs/page.md of a service that runs: `python -m tests.deploy.http.page.pictures URL FOLDER`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.deploy.http.page.browser import Browser, browser

WIDTH, HEIGHT = 1180, 1000
PROMPT = "def read_lines(path):"
HAS_A_TREE = """
const found = document.querySelectorAll('#tree .node.rejected').length > 3
    && document.querySelectorAll('#tree .node.accepted').length > 1;
if (!found) document.getElementById('previous').click();
return found || document.getElementById('previous').disabled;
"""


def _run(tab: Browser, address: str) -> None:
    tab.open(address)
    tab.wait("document.getElementById('model').options.length")
    tab.enter("#prompt", PROMPT)
    tab.click("#run")
    tab.wait("document.getElementById('summary').textContent")
    time.sleep(2.5)  # until the figures have been asked for again
    while not tab.run(HAS_A_TREE):
        pass
    tab.run("document.getElementById('output').scrollTop = 0")


def main(address: str, folder: Path) -> None:
    """A light one and a dark one of the same output."""
    with browser() as tab:
        tab.look(WIDTH, HEIGHT)
        _run(tab, address)
        for scheme in ("light", "dark"):
            tab.look(WIDTH, HEIGHT, scheme)
            (folder / f"page-{scheme}.png").write_bytes(tab.picture())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
