"""The least of an HTTP server that a library needs to be measured like a server: chats and completions, no streams.

Runs in the library's own environment, so it must import nothing but the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Prompt = str | list[dict[str, str]]
"""A text to continue, or messages to answer."""
Complete = Callable[[Prompt, int], tuple[str, int]]
"""Continues a prompt by at most so many tokens: the text, and how many. Each request has a thread of its own."""


def serve(port: int, complete: Complete) -> None:
    """Serve until the process ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"data": [{"id": "peer"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text, num_tokens = complete(body.get("messages") or body["prompt"], body["max_tokens"])
            choice = {"text": text, "message": {"role": "assistant", "content": text}}
            self._answer({"choices": [choice], "usage": {"completion_tokens": num_tokens}})

        def _answer(self, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Requests are measured, not logged."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        """Streams begin together; the default of 5 resets connections."""

    Server(("127.0.0.1", port), Handler).serve_forever()
