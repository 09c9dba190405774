"""The errors that storage raises: Kafka's storage error for clients, and a one-line message for operators."""

import errno

from chronik.wire.errors import ErrorCode, KafkaError

__all__ = ["DataFolderError", "StorageError", "StorageFull", "storage_error"]

FULL_ERRNOS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class StorageError(KafkaError):
    """The log cannot be written now; it contains no part of the append."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.kafka_storage_error, message)


class StorageFull(StorageError):
    """The disk, quota or file size limit is reached. The log accepts appends again when there is space."""


class DataFolderError(Exception):
    """The data folder cannot be used; the message is one line that says what to do."""


def storage_error(what: str, error: OSError) -> StorageError:
    """Return the error that a client receives for an `OSError` during disk access."""
    kind = StorageFull if error.errno in FULL_ERRNOS else StorageError
    return kind(f"{what}: {error.strerror or error}")
