"""Entries that are written to a Delta table's log here, because `deltalake` cannot make them.

An entry is created only if no other writer has created it, with the conditional writes of the store. Writers that use a
lock of their own instead would not notice it, so such tables are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from deltalake import DeltaTable

from chronik.pipeline.errors import PipelineError, Unavailable
from chronik.pipeline.storage import is_remote

CHECKPOINT_COMMITS = 100
LOCK_SETTING = "AWS_S3_LOCKING_PROVIDER"


def uses_lock() -> bool:
    return bool(os.environ.get(LOCK_SETTING))


def is_plain(table: DeltaTable) -> bool:
    """Return whether the table has no features beyond those of the tables that are made here."""
    protocol = table.protocol()
    has_features = bool(protocol.reader_features or protocol.writer_features)
    return protocol.min_reader_version == 1 and protocol.min_writer_version <= 2 and not has_features


def local_path(table: DeltaTable) -> str:
    from urllib.parse import unquote, urlsplit

    uri = str(table.table_uri)
    return unquote(urlsplit(uri).path) if uri.startswith("file://") else uri


def put_entry(table: DeltaTable, version: int, actions: Sequence[dict[str, Any]]) -> bytes | None:
    """Create the log's entry of this version. Return the existing entry if there is one. Raises PipelineError."""
    from obstore import get, put
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import LocalStore, from_url

    path = f"_delta_log/{version:020d}.json"
    entry = "\n".join(json.dumps(action) for action in actions).encode()
    try:
        store: Any = from_url(table.table_uri) if is_remote(table.table_uri) else LocalStore(local_path(table))
        try:
            put(store, path, entry, mode="create")
        except AlreadyExistsError:
            return bytes(get(store, path).bytes())
    except BaseError as error:
        kind = Unavailable if is_remote(table.table_uri) else PipelineError
        raise kind(f"cannot commit to the log of {table.table_uri}: {error}; its rows are intact") from None
    if version % CHECKPOINT_COMMITS == 0:
        table.update_incremental()
        table.create_checkpoint()
    return None
