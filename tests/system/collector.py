"""A collector of spans, as small as OTLP over HTTP allows: it keeps what is exported to it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

EXPORT_TIMEOUT_S = 30.0
"""More than the five seconds that exporters gather spans for."""


class Collector:
    """Listens while its `with` block runs."""

    def __init__(self) -> None:
        self.taken: list[ExportTraceServiceRequest] = []
        self._has_more = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector._take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, export: ExportTraceServiceRequest) -> None:
        with self._has_more:
            self.taken.append(export)
            self._has_more.notify_all()

    @property
    def _spans(self) -> list[Any]:
        scopes = [scope for export in self.taken for each in export.resource_spans for scope in each.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def spans_of(self, last: str) -> list[Any]:
        """All that has come, once a span named `last`, the last of a request to end, has."""
        with self._has_more:
            is_there = self._has_more.wait_for(lambda: any(span.name == last for span in self._spans), EXPORT_TIMEOUT_S)
            assert is_there, f"no span {last!r} was exported; there are {[span.name for span in self._spans]}"
            return self._spans
