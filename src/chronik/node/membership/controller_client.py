"""Calls to the controller: finds it, calls it, and retries if it moved, until a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from chronik.client.errors import ClientError
from chronik.node.membership.internal_api import (
    AllocateProducerIdsCall,
    Call,
    CallReply,
    EnvelopeReply,
    InternalKey,
    ProducerIdsResult,
    Result,
    decode_call_reply,
    encode,
)
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.runtime import Runtime
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest

R = TypeVar("R", CallReply, EnvelopeReply)

CALL_TIMEOUT_S = 30.0
RETRY_PAUSE_S_MIN = 0.02
RETRY_PAUSE_S_MAX = 0.25
NOBODY = -1
PRODUCER_IDS_PER_BLOCK = 1000


class ControllerClient:
    """Owned by the loop. If a response is lost, a call may be carried out twice: all calls tolerate that."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        peers: Peers,
        answer_here: Callable[[Call, int], Awaitable[CallReply]],
    ) -> None:
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._metadata = metadata
        self._peers = peers
        self._answer_here = answer_here
        self._turn = 0

    async def call(self, call: Call, timeout_s: float = CALL_TIMEOUT_S, *, waits_for_image: bool = True) -> Result:
        """Return the controller's result. Raise KafkaError if it refuses, REQUEST_TIMED_OUT if none answers in time.

        With `waits_for_image`, return only once this node's own image includes the call's effect.
        """
        deadline_s = self._loop.time() + timeout_s
        reply = await self.ask(
            InternalKey.CONTROLLER_CALL,
            encode(call),
            decode_call_reply,
            lambda: self._answer_here(call, self._node_id),
            deadline_s,
            deadline_s,
        )
        if reply.code:
            raise KafkaError(ErrorCode(reply.code), reply.message)
        assert reply.result is not None
        if waits_for_image:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._metadata.applied(reply.version)
            except TimeoutError:
                raise KafkaError(
                    ErrorCode.request_timed_out,
                    f"the change is committed, but this node has not applied version {reply.version} yet",
                ) from None
        return reply.result

    async def ask(
        self,
        key: InternalKey,
        body: bytes,
        decode: Callable[[memoryview], R],
        answer_here: Callable[[], Awaitable[R]],
        retry_until_s: float,
        deadline_s: float,
    ) -> R:
        """Return the controller's reply; if this node is the controller, use `answer_here`.

        Wait for a reply until `deadline_s`, but send nothing again after `retry_until_s`.
        """
        pause_s = RETRY_PAUSE_S_MIN
        hint = NOBODY
        while True:
            target = hint if hint != NOBODY else self._metadata.controller_id
            hint = NOBODY
            reason = "no controller is known"
            if target == NOBODY:
                # A node that is not in the Raft group (not yet or no longer) knows no leader; its peers may.
                target = self._next_peer()
            try:
                if target != NOBODY:
                    left_s = max(0.0, deadline_s - self._loop.time())
                    is_here = target == self._node_id
                    reply = (
                        await answer_here() if is_here else decode(await self._peers.call(target, key, body, left_s))
                    )
                    if reply.is_controller:
                        return reply
                    reason = f"node {target} is not the controller"
                    hint = reply.controller_id if reply.controller_id != target else NOBODY
            except (ClientError, MalformedRequest) as error:
                reason = str(error)
            if retry_until_s - self._loop.time() <= pause_s:
                raise KafkaError(ErrorCode.request_timed_out, f"the controller cannot be reached: {reason}")
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_PAUSE_S_MAX, 2 * pause_s)

    def _next_peer(self) -> int:
        """Return the next connected peer, round-robin."""
        connected = [peer for peer in self._peers.known() if self._peers.is_connected(peer)]
        if not connected:
            return NOBODY
        self._turn += 1
        return connected[self._turn % len(connected)]


class ProducerIds:
    """Producer ids for idempotent producers, from blocks that the controller allocates.

    Invariant: an id is handed out at most once. The unused ids of a block are lost when the process ends.
    """

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
                    AllocateProducerIdsCall(self._node_id, PRODUCER_IDS_PER_BLOCK), waits_for_image=False
                )
                assert isinstance(result, ProducerIdsResult)
                self._next, self._end = result.first, result.first + result.count
            self._next += 1
            return self._next - 1
