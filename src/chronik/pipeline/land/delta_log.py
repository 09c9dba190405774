"""Entries that are written to a Delta table's log here, because `deltalake` cannot make them.

An entry is created only if no other writer has created it, with the conditional writes of the store. Writers that use a
lock of their own instead would not notice it, so such tables are refused.

A client of an object store repeats a request that got no answer. If the first one was applied, the second one finds the
entry that it made itself. So each attempt's entry is unique, and an existing entry with the same bytes is a success.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from chronik.pipeline.errors import PipelineError, store_failure
from chronik.pipeline.land.task import remove_paths
from chronik.pipeline.storage import is_remote

CHECKPOINT_COMMITS = 100
LOCK_SETTING = "AWS_S3_LOCKING_PROVIDER"

logger = logging.getLogger(__name__)


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


def put_entry(
    table: DeltaTable, version: int, info: Mapping[str, Any], actions: Sequence[Mapping[str, Any]], attempt: str
) -> bytes | None:
    """Create the log's entry of this version. Return the entry of another writer if there is one.

    `attempt`: a name that no other attempt has, of this run or another. Raises PipelineError; the entry may exist then.
    """
    from obstore import get, put
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import LocalStore, from_url

    path = f"_delta_log/{version:020d}.json"
    lines = [{"commitInfo": {**info, "txnId": attempt}}, *actions]
    entry = "\n".join(json.dumps(action) for action in lines).encode()
    try:
        store: Any = from_url(table.table_uri) if is_remote(table.table_uri) else LocalStore(local_path(table))
        try:
            put(store, path, entry, mode="create")
        except AlreadyExistsError:
            existing = bytes(get(store, path).bytes())
            if existing != entry:
                return existing
    except BaseError as error:
        kind = store_failure(error) if is_remote(table.table_uri) else PipelineError
        raise kind(f"cannot commit to the log of {table.table_uri}: {error}; its rows are intact") from None
    if version % CHECKPOINT_COMMITS == 0:
        # The caller's table stays at its snapshot: the caller checks every commit since then.
        try:
            DeltaTable(table.table_uri).create_checkpoint()
        except (DeltaError, OSError) as error:  # the entry is there, and readers need no checkpoint
            logger.warning("no checkpoint of %s at version %d: %s", table.table_uri, version, error)
    return None


def live_paths(table: DeltaTable) -> set[str]:
    """Return the files of the table's snapshot."""
    return set(pa.table(table.get_add_actions()).column("path").to_pylist())


def remove_unused(table: DeltaTable, paths: Sequence[str]) -> None:
    """Remove the files of a failed commit, except those that are in the table: its failure may be a mistake.

    A vacuum removes them later if the table cannot be read now. `table` stays at its snapshot.
    """
    try:
        live = live_paths(DeltaTable(table.table_uri))
    except (DeltaError, OSError) as error:
        logger.warning("files of a failed commit remain in %s: %s", table.table_uri, error)
        return
    uri = table.table_uri if is_remote(table.table_uri) else local_path(table)
    remove_paths(uri, [path for path in paths if path not in live])


def invalidates(entry: bytes, taken: set[str]) -> bool:
    """Return whether a commit forbids a replacement of these files."""
    for line in entry.splitlines():
        action = json.loads(line) if line.strip() else {}
        if "metaData" in action or "protocol" in action or action.get("remove", {}).get("path") in taken:
            return True
    return False
