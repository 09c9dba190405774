"""Producer ids for idempotent producers, from blocks that the controller hands out once."""

from __future__ import annotations

import asyncio

from chronik.node.membership.controller_client import ControllerClient
from chronik.node.membership.internal_api import AllocateProducerIdsCall, ProducerIdsResult

BLOCK_IDS = 1000


class ProducerIds:
    """Invariant: an id is given at most once; what is left of a block is forgotten at the end of the process."""

    def __init__(self, client: ControllerClient, node_id: int) -> None:
        self._client = client
        self._node_id = node_id
        self._next = 0
        self._end = 0
        self._allocating = asyncio.Lock()

    async def next(self) -> int:
        async with self._allocating:
            if self._next == self._end:
                result = await self._client.call(
                    AllocateProducerIdsCall(self._node_id, BLOCK_IDS), waits_for_image=False
                )
                assert isinstance(result, ProducerIdsResult)
                self._next, self._end = result.first, result.first + result.count
            self._next += 1
            return self._next - 1
