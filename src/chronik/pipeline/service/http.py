"""The service's HTTP endpoint: /healthz, /readyz, /metrics and /status. It only reads."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Thread
from typing import Any, NamedTuple

from chronik.client.endpoint import Endpoint
from chronik.pipeline.errors import PipelineError

REQUESTS_MAX = 32
"""Concurrent requests. Further connections are closed."""
TIMEOUT_S = 10.0
TEXT = "text/plain; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    content_type: str = TEXT


class HealthServer:
    """Answers in threads of its own until `close`. Raises PipelineError if it cannot listen there."""

    def __init__(self, endpoint: Endpoint, routes: dict[str, Callable[[], Answer]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = TIMEOUT_S
            server_version = "chronik"
            sys_version = ""

            def do_GET(self) -> None:
                route = routes.get(self.path.partition("?")[0])
                known = ", ".join(routes)
                answer = Answer(f"there is nothing here: see {known}\n".encode(), 404) if route is None else route()
                self.send_response(answer.status)
                self.send_header("content-type", answer.content_type)
                self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
            slots = BoundedSemaphore(REQUESTS_MAX)

            def process_request(self, request: Any, client_address: Any) -> None:
                if not self.slots.acquire(blocking=False):
                    self.shutdown_request(request)
                    return
                try:
                    super().process_request(request, client_address)
                except BaseException:  # no further thread
                    self.slots.release()
                    raise

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    self.slots.release()

            def handle_error(self, *_: Any) -> None:
                pass  # the client has gone, or sent no HTTP

        try:
            self._server = Server((endpoint.host, endpoint.port), Handler)
        except OSError as error:
            raise PipelineError(
                f"cannot listen on {endpoint} for health checks and metrics: {error.strerror or error}; "
                'choose another listen, or listen = "" for none'
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, name="chronik-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
