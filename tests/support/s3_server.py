"""An S3 server that fails on request: `PUT /__fail?path=PART&status=500&applied=1` arms it for one request.

The next PUT with PART in its path gets that status, after it was applied or instead. Run as
`python -m tests.support.s3_server PORT`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

import pytest
from tests.support.eventually import eventually
from tests.support.ports import free_ports

BUCKET = "tables"
START_S_MAX = 60.0
FAIL = "/__fail"
CODES = {403: "AccessDenied", 500: "InternalError"}


class FaultyStore:
    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._store = DomainDispatcherApplication(create_backend_app)
        self._armed: dict[str, str] = {}
        self._lock = Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == FAIL:
            self._armed = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"]).items()}
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        with self._lock:
            armed = self._armed
            is_chosen = bool(armed) and environ["REQUEST_METHOD"] == "PUT" and armed["path"] in path
            if is_chosen and armed["status"] != "403":  # a refusal lasts
                self._armed = {}
        if not is_chosen:
            response: Iterable[bytes] = self._store(environ, start_response)
            return response
        status = int(armed["status"])
        if armed["applied"] == "1":
            b"".join(self._store(environ, lambda *_: None))
        body = f"<Error><Code>{CODES[status]}</Code></Error>".encode()
        start_response(f"{status} {CODES[status]}", [("Content-Length", str(len(body)))])
        return [body]


@contextmanager
def bucket() -> Iterator[str]:
    """Run the server, and yield the name of a bucket, which the environment has the address and credentials of."""
    # A process of its own: deltalake does not release the GIL while it waits for a response.
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.s3_server", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            eventually(lambda: _is_listening(port), START_S_MAX, "the server listens")
            _put(f"/{BUCKET}")
            yield BUCKET
    finally:
        server.kill()
        server.wait()


def fail_next(path: str, status: int = 500, *, applied: bool = True) -> None:
    """Have the server answer the next PUT of such a path with an error. 403 lasts until the next call."""
    _put(f"{FAIL}?path={path}&status={status}&applied={applied:d}")


def _put(path: str) -> None:
    request = urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + path, method="PUT")
    urllib.request.urlopen(request, timeout=START_S_MAX).close()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    from werkzeug.serving import run_simple

    run_simple("127.0.0.1", int(sys.argv[1]), FaultyStore(), threaded=True)
