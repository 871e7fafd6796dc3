"""The web page at `/`: one HTML document, assembled from the files in this folder.

It loads nothing from elsewhere. Its Content-Security-Policy names its style and script by their digests, so that
nothing else in the document runs.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from deploy.http.wire import Head, Headers, whole

FOLDER = Path(__file__).parent
SCRIPTS = ("dom.js", "stream.js", "output.js", "rounds.js", "figures.js", "main.js")
"""Scripts in this order; each may use definitions of those before it."""


@cache
def page_now() -> tuple[Head, bytes]:
    """The page and its head; the files are read once."""
    style = _read("page.css")
    # The function keeps the script's names out of the global scope.
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
