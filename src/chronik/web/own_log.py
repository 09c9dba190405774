"""A partition's log on this node, read in the executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from chronik.node.replicas.partition import Partition
from chronik.web.answers import Refusal
from chronik.web.node_view import NodeView
from chronik.wire.errors import ErrorCode, KafkaError

T = TypeVar("T")

READ_BYTES_MAX = 1024 * 1024


class OwnLog:
    """One partition that this node leads or replicates. A replica is read up to the high watermark that it knows."""

    def __init__(self, node: NodeView, partition: Partition) -> None:
        self._node = node
        self._partition = partition
        self._name = f"{partition.topic}-{partition.index}"
        self._generation = partition.generation

    async def bounds(self) -> tuple[int, int]:
        """Return the log start offset, and the first offset that consumers cannot see."""
        return self._partition.log_start_offset, self._partition.visible_end_offset

    async def offset_at(self, time_ms: int) -> int | None:
        """Return the offset of the first record at or after this time, or None if there is none."""
        partition = self._partition
        upto = partition.visible_end_offset
        found = await self.run(lambda: partition.log.offset_for_timestamp_job(time_ms, upto))
        return None if found is None or found.offset >= upto else found.offset

    async def read(self, offset: int) -> memoryview:
        """Return whole batches, starting with the one that contains `offset`; empty if there is none yet."""
        partition = self._partition
        upto = partition.visible_end_offset
        return memoryview(await self.run(lambda: partition.log.read_job(offset, READ_BYTES_MAX, upto)))

    async def run(self, plan: Callable[[], Callable[[], T]]) -> T:
        """Plan a log job here and run it in the executor. A truncation waits for the job."""
        partition = self._partition
        if partition.is_closed or not partition.jobs.begin():
            raise Refusal(503, f"the log of {self._name} is being cut or closed: ask again")
        with partition.jobs.running():
            try:
                found = await self._node.run_blocking(plan())
            except KafkaError as error:
                if error.code is ErrorCode.offset_out_of_range:
                    raise Refusal(503, f"{self._name}: {error.message} any more: ask again") from None
                raise Refusal(500, f"the log of {self._name} cannot be read: {error}; see the node's log") from None
            except OSError as error:
                raise Refusal(500, f"the log of {self._name} cannot be read: {error}; see the node's log") from None
        if partition.generation != self._generation:
            raise Refusal(503, f"the leader of {self._name} changed meanwhile: ask again")
        return found
