"""Writes group state to the offsets topic: in order, many appends in one batch, each within a time limit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from chronik.groups.actions import Append
from chronik.metadata.image import OFFSETS_TOPIC
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError

APPEND_BYTES_MAX = 512 * 1024
"""Waiting appends to the same partition share a batch up to this size."""

APPEND_TIMEOUT_S = 5.0
"""How long a batch may wait for the high watermark, like Kafka's `offsets.commit.timeout.ms`. After that it is unknown
whether the batch will be committed, so the waiting requests get an error."""


class GroupAppender:
    """Appends to one partition in order, one batch at a time; all waiting appends share the next batch (group commit).

    The number of waiting appends is bounded by the requests in flight, one for each connection.
    """

    def __init__(
        self, runtime: Runtime, host: PartitionHost, partition: int, appended: Callable[[int, ErrorCode], None]
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._runtime = runtime
        self._host = host
        self._partition = partition
        self._appended = appended
        self._log = runtime.log.bind(component="groups")
        self._waiting: deque[Append] = deque()
        self._is_closed = False

    def add(self, append: Append) -> None:
        self._waiting.append(append)
        if self.task is None:
            name = f"append-groups-{self._partition}"
            self.task = self._runtime.loop.create_task(self._write_all(), name=name)

    def close(self) -> None:
        """Stop after the partition moved: drop the waiting appends, and ignore the outcome of the running one."""
        self._is_closed = True
        self._waiting.clear()

    async def _write_all(self) -> None:
        while self._waiting:
            taken = self._take()
            error = await self._write(taken)
            if error is ErrorCode.request_timed_out:
                # Later appends cannot be committed before this batch and have already waited for it: fail them too.
                taken += self._waiting
                self._waiting.clear()
            for append in taken:
                if self._is_closed:
                    return
                self._appended(append.token, error)
        self.task = None

    def _take(self) -> list[Append]:
        taken = [self._waiting.popleft()]
        size_bytes = _size_bytes(taken[0])
        while self._waiting and (size_bytes := size_bytes + _size_bytes(self._waiting[0])) <= APPEND_BYTES_MAX:
            taken.append(self._waiting.popleft())
        return taken

    async def _write(self, appends: list[Append]) -> ErrorCode:
        wall_ms = self._runtime.env.wall_ms()
        batch = encode_batch([(key, value, [], wall_ms) for append in appends for key, value in append.records])
        try:
            await self._host.append_internal(OFFSETS_TOPIC, self._partition, batch, APPEND_TIMEOUT_S)
        except KafkaError as error:
            self._log.warning("groups_append_failed", partition=self._partition, error=str(error))
            return error.code
        except Exception as error:
            self._log.exception("groups_append_failed", partition=self._partition, error=repr(error))
            return ErrorCode.unknown_server_error
        return ErrorCode.none


def _size_bytes(append: Append) -> int:
    return sum(len(key) + len(value or b"") for key, value in append.records)
