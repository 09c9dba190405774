"""Addresses of Azure and Google: they reach the store's client with its options. No store is there, only a listener."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from tests.support.eventually import eventually
from tests.support.landing import records
from tests.support.ports import free_ports

from chronik.pipeline.audit.table import find_tables
from chronik.pipeline.errors import PipelineError, Unavailable
from chronik.pipeline.land.delta import LandingTable
from chronik.pipeline.land.delta_log import put_entry
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import table_schema
from chronik.pipeline.land.task import WriteTask

START_S_MAX = 60.0
LISTENER = """
import http.server, sys
class Refuse(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def refuse(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        with open(sys.argv[2], "a") as log:
            print(self.command, self.path, self.headers.get("authorization"), file=log)
        self.send_response(403)
        self.send_header("content-length", "0")
        self.end_headers()
    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = refuse
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Refuse)
open(sys.argv[2], "w").close()
server.serve_forever()
"""


class Listener(NamedTuple):
    address: str
    log: Path

    def requests(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    # A process of its own: deltalake does not release the GIL while it waits for a response.
    (port,) = free_ports(1)
    log = tmp_path / "requests"
    server = subprocess.Popen([sys.executable, "-c", LISTENER, str(port), str(log)])
    try:
        eventually(log.exists, START_S_MAX, "the listener listens")
        yield Listener(f"http://127.0.0.1:{port}", log)
    finally:
        server.kill()
        server.wait()


def azure(listener: Listener, folder: Path, patch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    """Return an address, what a request for it has in its path, and what shows the credentials."""
    patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "shop")
    patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    patch.setenv("AZURE_STORAGE_ENDPOINT", listener.address)
    patch.setenv("AZURE_ALLOW_HTTP", "true")
    return "az://box/tables/t", "/box", "SharedKey shop:"


def google(listener: Listener, folder: Path, patch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    account = {"gcs_base_url": listener.address, "disable_oauth": True, "client_email": "", "private_key": ""}
    (folder / "account.json").write_text(json.dumps({**account, "private_key_id": ""}))
    patch.setenv("GOOGLE_SERVICE_ACCOUNT", str(folder / "account.json"))
    patch.setenv("GOOGLE_ALLOW_HTTP", "true")
    return "gs://box/tables/t", "/box", ""


@pytest.mark.parametrize("store", [azure, google])
def test_an_address_reaches_the_stores_client_with_its_options(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Any
) -> None:
    uri, path, credentials = store(listener, tmp_path, monkeypatch)
    done = 0
    for use in (
        lambda: LandingTable.open(uri, table_schema(None), "t", "id-1"),
        lambda: WriteTask(uri, "", "x", None, LandedOffsets()).write(iter([records(0, range(3))]), "part"),
        lambda: put_entry(cast("Any", SimpleNamespace(table_uri=uri)), 1, {}, [], "attempt"),
        lambda: find_tables(uri, "t"),
    ):
        with pytest.raises(PipelineError) as refused:
            use()
        assert not isinstance(refused.value, Unavailable)
        sent = listener.requests()[done:]
        done += len(sent)
        assert sent and all(path in line and credentials in line for line in sent), (sent, refused.value)
