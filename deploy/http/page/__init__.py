"""The page for people at `/`: one HTML document, put together from the files beside this one.

It loads nothing from elsewhere, and its Content-Security-Policy names the very style and script that it has by their
digests: whatever else finds its way into the document is not run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from deploy.http.wire import Head, Headers, whole

FOLDER = Path(__file__).parent
SCRIPTS = ("dom.js", "stream.js", "output.js", "rounds.js", "figures.js", "main.js")
"""In this order; a script may use what those before it define."""


@cache
def page_now() -> tuple[Head, bytes]:
    """The page of this version, and the head that it goes with; its files are read once."""
    style = _read("page.css")
    # A function of its own: no name of it is global.
    script = "\n(() => {\n'use strict';\n" + "\n".join(map(_read, SCRIPTS)) + "})();\n"
    document = _read("page.html").replace("/* style */", style).replace("/* script */", script)
    return whole(document.encode(), headers=_headers(style, script))


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _headers(style: str, script: str) -> Headers:
    policy = (
        "default-src 'none'",
        f"style-src {_digest(style)}",
        f"script-src {_digest(script)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    return (
        ("content-type", "text/html; charset=utf-8"),
        ("content-security-policy", "; ".join(policy)),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-cache"),
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
