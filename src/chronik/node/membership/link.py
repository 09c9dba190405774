"""The control link to one peer: opened, kept alive, and opened again when it is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from chronik.client.connection import Connection
from chronik.client.errors import ClientError, ConnectionLost, Refused, Unreachable
from chronik.node.endpoint import Endpoint
from chronik.node.membership.internal_api import VERSION, InternalKey

if TYPE_CHECKING:
    from chronik.node.membership.peers import Peers

CONTROL = "control"
CONNECT_TIMEOUT_S = 1.0

PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 1.0
GREET_INTERVAL_S = 1.0
SILENCE_S_MAX = 4.0
"""A peer that leaves a HELLO unanswered for so long is given up, and so is what was sent to it."""

QUEUED_MESSAGES_MAX = 64


class PeerState(Enum):
    CONNECTED = "connected"
    REFUSED = "refused"
    """Nobody listens there: the process is gone."""
    REJECTED = "rejected"
    """It answers, and does not want to talk to us."""
    SILENT = "silent"


class PeerStatus(NamedTuple):
    """`since_s` is on the loop's clock. `reason` is one line for people, empty while connected."""

    state: PeerState
    since_s: float
    reason: str = ""


class Rejected(ClientError):
    """The peer refused our HELLO, in the words of this exception."""


class Link:
    """Invariant: `_connection` is greeted and open, or None. Owned by the loop; a task of its own keeps it up."""

    def __init__(self, peers: Peers, node_id: int, endpoint: Endpoint) -> None:
        self.node_id = node_id
        self.endpoint = endpoint
        self.status = PeerStatus(PeerState.SILENT, peers.loop.time(), "not connected yet")
        self._peers = peers
        self._loop = peers.loop
        self._connection: Connection | None = None
        self._is_trying = True
        self._queue: deque[tuple[InternalKey, bytes]] = deque(maxlen=QUEUED_MESSAGES_MAX)
        self._draining: asyncio.Task[None] | None = None
        self._poked = asyncio.Event()
        self._tried: asyncio.Future[None] = self._loop.create_future()
        self._task = self._loop.create_task(self._keep_up(), name=f"link-{node_id}")

    def poke(self) -> None:
        """The peer is there: try now."""
        self._poked.set()

    def close(self) -> None:
        self._task.cancel()
        if self._draining is not None:
            self._draining.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if not self._tried.done():
            self._tried.set_result(None)

    # -- use -----------------------------------------------------------------------------------------------------------

    def send(self, key: InternalKey, body: bytes) -> None:
        connection = self._connection
        if connection is not None and not self._queue and connection.is_writable:
            connection.send_unanswered(key, VERSION, body)
        elif connection is not None or self._is_trying:
            self._queue.append((key, body))
            if connection is not None and self._draining is None:
                self._draining = self._loop.create_task(self._drain(connection), name=f"drain-{self.node_id}")

    async def call(self, key: InternalKey, body: bytes, timeout_s: float) -> memoryview:
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connected()
                return await connection.send(key, VERSION, body)
        except TimeoutError:
            raise ConnectionLost(f"node {self.node_id} did not answer within {timeout_s:g} s") from None

    async def _connected(self) -> Connection:
        """The open connection; waits for the attempt that runs, and fails with it."""
        if self._connection is None and self._is_trying:
            await asyncio.shield(self._tried)
        if self._connection is None:
            raise Unreachable(f"node {self.node_id} at {self.endpoint} cannot be reached: {self.status.reason}")
        return self._connection

    async def _drain(self, connection: Connection) -> None:
        try:
            while self._queue and self._connection is connection:
                await connection.drained()
                while self._queue and connection.is_writable:
                    connection.send_unanswered(self._queue[0][0], VERSION, self._queue[0][1])
                    self._queue.popleft()
        except ClientError:
            self._queue.clear()
        finally:
            self._draining = None

    # -- upkeep --------------------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        pause_s = 0.0
        while True:
            self._poked.clear()
            if not self._is_trying:
                self._is_trying = True
                self._tried = self._loop.create_future()
            opened_s = self._loop.time()
            error = await self._until_lost()
            self._report(error)
            if self._loop.time() - opened_s > PAUSE_S_MAX:
                # It was up for a while: whether the process is still there is known with the next attempt.
                pause_s = 0.0
                continue
            pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * pause_s))
            try:
                async with asyncio.timeout(pause_s * (0.75 + self._peers.random.random() / 4)):
                    await self._poked.wait()
            except TimeoutError:
                continue

    async def _until_lost(self) -> Exception:
        """One life of the connection; what ended it, or kept it from beginning."""
        try:
            connection = await self._peers.open(self.node_id, self.endpoint, CONTROL, CONNECT_TIMEOUT_S)
        except ClientError as error:
            return error
        self._connection = connection
        self._set_status(PeerState.CONNECTED, "")
        self._peers.log.info("peer_connected", peer=self.node_id, address=str(self.endpoint))
        if self._queue and self._draining is None:
            self._draining = self._loop.create_task(self._drain(connection), name=f"drain-{self.node_id}")
        try:
            while True:
                try:
                    async with asyncio.timeout(GREET_INTERVAL_S):
                        return await connection.wait_closed()
                except TimeoutError:
                    await self._peers.greet(connection, self.node_id, CONTROL, SILENCE_S_MAX)
        except ClientError as error:
            if not connection.is_closed:
                self._peers.silent(self.node_id)
            return error
        finally:
            connection.close()
            self._connection = None

    def _report(self, error: Exception) -> None:
        state = _state_after(error)
        reason = str(error)
        if state is not self.status.state or (state is PeerState.REJECTED and reason != self.status.reason):
            say = self._peers.log.error if state is PeerState.REJECTED else self._peers.log.warning
            say("peer_not_connected", peer=self.node_id, address=str(self.endpoint), state=state.value, reason=reason)
        self._queue.clear()
        self._set_status(state, reason)
        if state is PeerState.REFUSED:
            self._peers.refused(self.node_id)

    def _set_status(self, state: PeerState, reason: str) -> None:
        since_s = self.status.since_s if state is self.status.state else self._loop.time()
        self.status = PeerStatus(state, since_s, reason)
        self._is_trying = False
        if not self._tried.done():
            self._tried.set_result(None)


def _state_after(error: Exception) -> PeerState:
    """What the end of a connection, or a failed attempt at one, says about the peer."""
    if isinstance(error, Refused):
        return PeerState.REFUSED
    return PeerState.REJECTED if isinstance(error, Rejected) else PeerState.SILENT
