"""The files of tables: local folders, and object stores by any address that `deltalake` takes.

`deltalake`'s own file system is used for object stores, so that addresses and credentials (from the environment) mean
the same for a table's log and for its files. It is imported only for them: tasks on local folders do not need it.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.fs as fs

from chronik.pipeline.errors import PipelineError


def is_remote(uri: str) -> bool:
    return "://" in uri


class TableFiles:
    """The files of one table, by their paths in it."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        if not is_remote(uri):
            self.store, self._root = fs.LocalFileSystem(), uri.rstrip("/") + "/"
            return
        from deltalake.exceptions import DeltaError
        from deltalake.fs import DeltaStorageHandler

        try:
            self.store, self._root = fs.PyFileSystem(DeltaStorageHandler(uri)), ""
        except (DeltaError, OSError, ValueError, pa.ArrowInvalid) as error:
            raise PipelineError(f"cannot use the address {uri}: {error}") from None

    def full(self, path: str) -> str:
        """Return the path of a file for `store`."""
        return self._root + path
