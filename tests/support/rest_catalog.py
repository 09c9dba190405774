"""A REST catalog of Iceberg tables: the requests that pyiceberg sends for a landing, answered from a SQL catalog.

`fail_next` makes it answer the next commit with an error, after the commit was applied or instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import msgspec
from pyiceberg.catalog.rest import CreateTableRequest, TableResponse
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import CommitTableRequest
from pyiceberg.table.metadata import new_table_metadata

STATUS = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
}
TOKEN = "sesame"


class RestCatalog(HTTPServer):
    """Answers one request after another, in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tables = SqlCatalog("rest", uri=f"sqlite:///{folder}/rest.db", warehouse=f"file://{folder}")
        self.requests: list[str] = []
        self.failure: tuple[int, bool] | None = None

    @property
    def options(self) -> dict[str, str]:
        """Settings of pyiceberg for this catalog."""
        uri = f"http://127.0.0.1:{self.server_port}"
        return {"type": "rest", "uri": uri, "token": TOKEN, "namespace": "sales"}

    def fail_next(self, status: int, *, applied: bool) -> None:
        self.failure = status, applied

    def answer(self, method: str, parts: list[str], body: bytes) -> tuple[int, bytes]:
        match method, parts:
            case "GET", ["config"]:
                return 200, b'{"defaults": {}, "overrides": {}}'
            case "POST", ["namespaces"]:
                namespace = msgspec.json.decode(body)["namespace"]
                self.tables.create_namespace(tuple(namespace))
                return 200, msgspec.json.encode({"namespace": namespace, "properties": {}})
            case "POST", ["namespaces", namespace, "tables"]:
                return 200, self._staged((namespace,), CreateTableRequest.model_validate_json(body))
            case "GET", ["namespaces", namespace, "tables", name]:
                return 200, self._loaded((namespace, name))
            case "POST", ["namespaces", namespace, "tables", name]:
                return self._committed((namespace, name), CommitTableRequest.model_validate_json(body))
        raise NotImplementedError(f"{method} {'/'.join(parts)}")

    def _staged(self, namespace: tuple[str, ...], request: CreateTableRequest) -> bytes:
        assert request.stage_create and request.partition_spec and request.write_order and request.location
        if self.tables.table_exists((*namespace, request.name)):
            raise TableAlreadyExistsError(f"{request.name} exists")
        parts = request.table_schema, request.partition_spec, request.write_order
        metadata = new_table_metadata(*parts, request.location, request.properties)
        return TableResponse(metadata=metadata).model_dump_json(by_alias=True).encode()

    def _loaded(self, name: tuple[str, str]) -> bytes:
        table = self.tables.load_table(name)
        response = TableResponse.model_validate(
            {"metadata-location": table.metadata_location, "metadata": table.metadata}
        )
        return response.model_dump_json(by_alias=True).encode()

    def _committed(self, name: tuple[str, str], request: CommitTableRequest) -> tuple[int, bytes]:
        failure, self.failure = self.failure, None
        if failure is not None and not failure[1]:
            return failure[0], _error(failure[0], "not applied")
        table = cast("Any", SimpleNamespace(name=lambda: name))
        response = self.tables.commit_table(table, request.requirements, request.updates)
        if failure is not None:
            return failure[0], _error(failure[0], "applied")
        return 200, response.model_dump_json(by_alias=True).encode()


class _Handler(BaseHTTPRequestHandler):
    server: RestCatalog

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.removeprefix("/v1/").split("/")]
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        try:
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                status, answer = 401, _error(401, "not authorized")
            else:
                status, answer = self.server.answer(self.command, parts, body)
        except tuple(STATUS) as error:
            status = STATUS[type(error)]
            answer = _error(status, str(error), type(error).__name__)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_HEAD = do_DELETE = _answer

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _error(status: int, message: str, kind: str = "Refused") -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


@contextmanager
def rest_catalog(folder: Path) -> Iterator[RestCatalog]:
    """Run a catalog whose tables are described in this folder."""
    with RestCatalog(folder) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="rest-catalog", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.tables.close()
