"""An S3 server that fails on request: `PUT /__fail?path=PART&status=500&applied=1` arms it for one request.

The next PUT with PART in its path gets that status, after it was applied or instead. Run as
`python -m tests.support.s3_server PORT`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

FAIL = "/__fail"
CODES = {403: "AccessDenied", 500: "InternalError"}


class FaultyStore:
    def __init__(self) -> None:
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


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), FaultyStore(), threaded=True)
