"""Batches for topics that validate the schema ids of their records, and those of them that wait for the registry.

Topics that do not ask for it cost one comparison. A batch whose ids this node's view of the registry has is appended
at once. Otherwise it waits, with all later batches of its partition, until the view has caught up with the leader of
`_schemas`; one request at a time does that for all partitions. What is unknown then is refused with INVALID_RECORD.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from chronik.node.replicas.partition import DECODED_BYTES_PER_BYTE_MAX, DECODED_RECORDS_MAX, Partition
from chronik.node.runtime import Runtime
from chronik.schemas.errors import Refused
from chronik.schemas.validation import RecordPrefix, SchemaCheck, ids_of, unregistered
from chronik.wire.batch import batch_prefixes, check_batches
from chronik.wire.errors import ErrorCode, KafkaError

Resume = Callable[[KafkaError | None], None]


class RegistryView(Protocol):
    """This node's view of the schema registry."""

    def accepts(self, topic: str, check: SchemaCheck, schema_id: int) -> bool: ...

    async def refresh(self) -> None:
        """Read this node's replica of the registry's topic."""

    async def catch_up(self) -> None:
        """Read all that the leader has committed. Raises Refused."""


@dataclass(slots=True)
class WaitingBatch:
    partition: Partition
    records: memoryview
    resume: Resume
    round: int
    """The last round of catching up that had begun when the batch arrived."""


class SchemaChecks:
    """Owned by the loop. Invariant: the batches of a partition are appended in the order in which they arrived."""

    def __init__(self, runtime: Runtime, view: RegistryView) -> None:
        self._runtime = runtime
        self._view = view
        self._waiting: dict[Partition, deque[WaitingBatch]] = {}
        self._round = 0
        self._task: asyncio.Task[None] | None = None

    def must_wait(self, partition: Partition, records: memoryview) -> bool:
        """Return whether a batch must wait. Raise INVALID_RECORD if a record has no schema id."""
        return partition in self._waiting or bool(self._unknown(partition, records))

    def wait(self, partition: Partition, records: memoryview, resume: Resume) -> None:
        """Call `resume` with None when the batch may be appended, or with the reason why it may not."""
        batch = WaitingBatch(partition, records, resume, self._round)
        self._waiting.setdefault(partition, deque()).append(batch)
        if self._task is None:
            self._task = self._runtime.loop.create_task(self._catch_up(), name="schema-checks")

    def _unknown(self, partition: Partition, records: memoryview) -> dict[SchemaCheck, set[int]]:
        checks = partition.settings.schema_checks
        if not checks:
            return {}
        found = ids_of(_prefixes(partition, records), checks)
        if found.errors:
            raise _invalid(partition, found.errors)
        unknown = {
            check: {each for each in ids if not self._view.accepts(partition.topic, check, each)}
            for check, ids in found.ids.items()
        }
        return {check: ids for check, ids in unknown.items() if ids}

    async def _catch_up(self) -> None:
        try:
            while self._waiting:
                self._round += 1
                error: KafkaError | None = None
                try:
                    await self._view.refresh()
                    self._release(self._round - 1, is_final=False)
                    if not self._waiting:
                        return
                    await self._view.catch_up()
                except Refused as refused:
                    reason = f"the schema registry cannot be read: {refused.message}"
                    error = KafkaError(ErrorCode.not_enough_replicas, reason)
                except Exception:
                    self._runtime.log.exception("schema_check_failed")
                    error = KafkaError(ErrorCode.not_enough_replicas, "the schema registry cannot be read: see the log")
                self._release(self._round - 1, is_final=True, error=error)
        finally:
            self._task = None

    def _release(self, last_round: int, *, is_final: bool, error: KafkaError | None = None) -> None:
        """Resume the first batches of each partition whose outcome is known.

        It is final for batches that arrived up to `last_round`: the view has all that was committed before.
        """
        for partition, batches in list(self._waiting.items()):
            while batches:
                batch = batches[0]
                try:
                    unknown = self._unknown(partition, batch.records)
                    outcome = None
                    if unknown:
                        if not is_final or batch.round > last_round:
                            break
                        errors = unregistered(_prefixes(partition, batch.records), unknown)
                        outcome = error or _invalid(partition, errors)
                except KafkaError as refused:
                    outcome = refused
                batches.popleft()
                if not batches:
                    del self._waiting[partition]
                batch.resume(outcome)


def _prefixes(partition: Partition, records: memoryview) -> list[RecordPrefix]:
    """Return the first bytes of each key and value of a batch, after the checks that an append does."""
    settings = partition.settings
    count = sum(header.record_count for _, header in check_batches(records, settings.max_message_bytes))
    if count > DECODED_RECORDS_MAX:
        limit = f"at most {DECODED_RECORDS_MAX} if the broker validates schemas"
        raise KafkaError(ErrorCode.invalid_record, f"{count} records in a batch; {limit}")
    return batch_prefixes(records, DECODED_BYTES_PER_BYTE_MAX * settings.max_message_bytes)


def _invalid(partition: Partition, errors: list[tuple[int, str]]) -> KafkaError:
    message = f"{partition.topic} validates schemas: {errors[0][1] if errors else 'a schema id is unknown'}"
    return KafkaError(ErrorCode.invalid_record, message, errors)
