"""The service's health endpoint."""

from __future__ import annotations

import urllib.request
from socketserver import ThreadingMixIn

import pytest

from chronik.client.endpoint import Endpoint
from chronik.pipeline.service.http import REQUESTS_MAX, Answer, HealthServer


def test_requests_that_get_no_thread_do_not_use_up_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = [0]

    def fail(*_: object) -> None:
        tries[0] += 1
        raise RuntimeError("can't start new thread")

    server = HealthServer(Endpoint("127.0.0.1", 0), {"/healthz": lambda: Answer(b"alive\n")})
    address = f"http://127.0.0.1:{server.port}/healthz"
    try:
        with monkeypatch.context() as patched:
            patched.setattr(ThreadingMixIn, "process_request", fail)
            for _ in range(REQUESTS_MAX):
                with pytest.raises(OSError):
                    urllib.request.urlopen(address, timeout=10)
        assert tries[0] == REQUESTS_MAX
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.read() == b"alive\n"
    finally:
        server.close()
