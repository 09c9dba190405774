"""Ledgers (what was acknowledged) and receipts (what was delivered): JSON Lines, one record each.

    {"topic": str, "partition": int, "offset": int, "key": base64 or null, "timestamp_ms": int, "checksum": int}

`checksum` is `wire.checksum.record_checksum`. Lines are handed to the system whenever a batch of reports has been
written, so a killed process loses at most the batch it was in.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from chronik.cli.errors import CliError
from chronik.wire.checksum import record_checksum


class RecordFile:
    """An append-only file of records, opened anew by each command. Close it, or its last batch may be missing."""

    def __init__(self, path: str, flag: str) -> None:
        try:
            self._file = open(path, "w", encoding="ascii", buffering=1024 * 1024)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise CliError(f"cannot write {path}: {error.strerror}; choose another {flag}") from None

    def add(self, message: Any) -> None:
        """One delivered confluent-kafka message."""
        self.write(
            message.topic(),
            message.partition(),
            message.offset(),
            message.timestamp()[1],
            message.key(),
            message.value(),
            message.headers() or (),
        )

    def write(
        self,
        topic: str,
        partition: int,
        offset: int,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        line = {
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "key": None if key is None else b64encode(key).decode(),
            "timestamp_ms": timestamp_ms,
            "checksum": record_checksum(key, value, headers),
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
