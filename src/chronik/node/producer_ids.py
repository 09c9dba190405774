"""Producer ids for idempotent producers, from blocks that the metadata log hands out once."""

from __future__ import annotations

import asyncio

from chronik.metadata.commands import AllocateProducerIds
from chronik.metadata.events import ProducerIdsAllocated
from chronik.node.metadata_log import MetadataLog

BLOCK_IDS = 1000


class ProducerIds:
    """Invariant: an id is given at most once; what is left of a block is forgotten at the end of the process."""

    def __init__(self, metadata: MetadataLog, node_id: int) -> None:
        self._metadata = metadata
        self._node_id = node_id
        self._next = 0
        self._end = 0
        self._allocating = asyncio.Lock()

    async def next(self) -> int:
        async with self._allocating:
            if self._next == self._end:
                for event in await self._metadata.propose(AllocateProducerIds(self._node_id, BLOCK_IDS)):
                    if isinstance(event, ProducerIdsAllocated):
                        self._next, self._end = event.first, event.first + event.count
            self._next += 1
            return self._next - 1
