"""What a local node reports through its HTTP port, also if another server has taken that port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from chronik.local.node import LocalNode, write_settings


@contextmanager
def answering(body: bytes) -> Iterator[int]:
    """Run an HTTP server that answers every request with this body, and yield its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("body", "view"), [(b'{"version": 3}', {"version": 3}), (b"<html>", None), (b"[1]", None), (b"\xff", None)]
)
async def test_a_cluster_view_that_is_not_an_object_is_no_answer(tmp_path: Path, body: bytes, view: object) -> None:
    """On an event loop, as asynchronous tests use local clusters."""
    with answering(body) as port:
        write_settings(str(tmp_path), {"node_id": 1, "listen": {"http": f"127.0.0.1:{port}"}})
        assert LocalNode(str(tmp_path)).cluster_view() == view
