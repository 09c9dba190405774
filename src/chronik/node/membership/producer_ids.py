"""Producer ids for idempotent producers, from blocks that the controller allocates once."""

from __future__ import annotations

import asyncio

from chronik.node.membership.controller_client import ControllerClient
from chronik.node.membership.internal_api import AllocateProducerIdsCall, ProducerIdsResult

BLOCK_IDS = 1000


class ProducerIds:
    """Invariant: an id is handed out at most once. The unused ids of a block are lost when the process ends."""

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
