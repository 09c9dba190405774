"""The catalog of Iceberg tables: any that pyiceberg knows, or a file in the folder of the tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from chronik.pipeline.errors import PipelineError, Unavailable, is_refusal
from chronik.pipeline.storage import is_remote

CATALOG_FILE = "iceberg.db"
CATALOG = "chronik"
NAMESPACE = "chronik"
_UNCLEAR = {
    "CommitStateUnknownException",
    "ConnectionError",
    "OperationalError",
    "ServerError",
    "ServiceUnavailableError",
    "Timeout",
    "TimeoutError",
    "TooManyRequestsError",
}
"""Errors of pyiceberg, requests, SQLAlchemy and Python. By their names, because only some of these are installed."""


def open_catalog(folder: str, options: Mapping[str, str]) -> Any:
    """Return the catalog of these options, or without any a SQL catalog in a file of the folder. Raises PipelineError.

    `options` are pyiceberg's: `type`, `uri`, `warehouse`, and so on. `namespace` is ours.
    """
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError:
        raise PipelineError("pyiceberg is not installed: pip install 'chronik[iceberg]'") from None
    given = {name: value for name, value in options.items() if name != "namespace"}
    if not given:
        if is_remote(folder):
            raise PipelineError(f"{folder} is no folder for a catalog: pass --catalog type=rest --catalog uri=URL")
        os.makedirs(folder, exist_ok=True)
        path = os.path.abspath(f"{folder}/{CATALOG_FILE}")
        given = {"type": "sql", "uri": f"sqlite:///{path}", "warehouse": f"file://{os.path.abspath(folder)}"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    store = {} if endpoint is None else {"s3.endpoint": endpoint}
    return guarded(lambda: load_catalog(CATALOG, **{**store, **given}), "cannot open the catalog")


def find_table(uri: str, options: Mapping[str, str]) -> Any:
    """Return pyiceberg's table at DIR/NAME, or None if the catalog has none. Creates no catalog.

    Raises PipelineError.
    """
    folder, _, name = uri.rstrip("/").rpartition("/")
    folder, full_name = folder or ".", (options.get("namespace", NAMESPACE), name)
    is_file = options.keys() <= {"namespace"} and not is_remote(folder)
    if is_file and not os.path.exists(f"{folder}/{CATALOG_FILE}"):
        return None
    catalog = open_catalog(folder, options)
    where = f"cannot read the table {'.'.join(full_name)}"
    return guarded(lambda: catalog.load_table(full_name) if catalog.table_exists(full_name) else None, where)


def guarded(call: Callable[[], Any], what: str) -> Any:
    """Call pyiceberg, and report its errors and those of its catalogs as one line.

    An error is Unavailable if the catalog did not answer, or not clearly: a commit may have taken place then.
    """
    try:
        return call()
    except PipelineError:
        raise
    except Exception as error:
        is_store_fault = "AWS Error" in str(error) and not is_refusal(error)
        if is_store_fault or _UNCLEAR & {kind.__name__ for kind in type(error).__mro__}:
            raise Unavailable(f"{what}: {error}; no record lands twice") from None
        if type(error).__module__.split(".")[0] not in ("pyiceberg", "sqlalchemy", "requests", "pyarrow", "builtins"):
            raise
        raise PipelineError(f"{what}: {type(error).__name__}: {error}") from None
