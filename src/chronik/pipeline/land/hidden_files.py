"""Files of a table with one row per key that are in no commit: staged changes, and the keys that were deleted.

Their folder begins with `_`, so readers and the vacuum ignore it.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import pyarrow.fs as fs
from deltalake import DeltaTable

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta_log import local_path
from chronik.pipeline.storage import TableFiles, is_remote

FOLDER = "_chronik"
STAGED, DELETED = "staged", "deleted"
KEEP_H = 24
"""Longer than any attempt at a batch, which may still use a file."""

logger = logging.getLogger(__name__)


def staged_path(name: str) -> str:
    return f"{FOLDER}/{STAGED}/{name}.parquet"


def deleted_path(bucket: int, number: int) -> str:
    return f"{FOLDER}/{DELETED}/{bucket}-{number}.parquet"


def deleted_transaction(bucket: int) -> str:
    """Return the application transaction with the number of a bucket's current file of deleted keys."""
    return f"chronik:deleted:{bucket}"


def remove_hidden(table: DeltaTable, now_ms: int) -> list[str]:
    """Remove files that no attempt needs any more, as far as possible. Return their paths."""
    uri = table.table_uri if is_remote(table.table_uri) else local_path(table)
    before = datetime.fromtimestamp(now_ms / 1000, UTC) - timedelta(hours=KEEP_H)
    removed: list[str] = []
    try:
        files = TableFiles(uri)
        for folder in (STAGED, DELETED):
            selector = fs.FileSelector(files.full(f"{FOLDER}/{folder}"), allow_not_found=True)
            for file in files.store.get_file_info(selector):
                if file.mtime is None or file.mtime > before:
                    continue
                bucket, _, number = file.base_name.partition(".")[0].partition("-")
                if folder == DELETED and f"{table.transaction_version(deleted_transaction(int(bucket)))}" == number:
                    continue
                files.store.delete_file(file.path)
                removed.append(file.path)
    except (OSError, ValueError, PipelineError) as error:
        logger.warning("files of earlier attempts remain in %s: %s", uri, error)
    return removed
