"""A follower's fetch session with one leader: one connection, one long poll, and recovery when either ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol
from uuid import UUID

from chronik.client.connection import Connection
from chronik.client.errors import ClientError, ConnectionLost
from chronik.observe.logging import Logger
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, MalformedRequest
from chronik.wire.fetch import FetchRequest, FetchResponse, FetchTopic, read_fetch_response, write_fetch_request

FETCH_VERSION = 18
WAIT_MS = 500
ANSWER_TIMEOUT_S = 3.0
"""If a leader leaves a fetch unanswered this long beyond its max wait, the follower reconnects."""
RESPONSE_BYTES_MAX = 8 * 1024 * 1024
IN_FLIGHT_MAX = 2
PAUSE_S_MIN = 0.02
PAUSE_S_MAX = 1.0
REFUSED_PAUSE_S = 0.1
SESSION_EPOCH_MAX = 0x7FFFFFFF
SESSION_ERRORS = (ErrorCode.fetch_session_id_not_found, ErrorCode.invalid_fetch_session_epoch)


class FetchSource(Protocol):
    """The source of the fetches: it supplies the positions and takes the responses."""

    def has_due(self) -> bool:
        """Whether there are new positions to send."""

    def may_wait(self) -> bool:
        """Whether new positions are expected shortly, so that an idle session waits for them."""

    def named(self, number: int) -> tuple[list[FetchTopic], list[tuple[UUID, int]]]:
        """Return the partitions that fetch `number` includes, and those it removes from the session."""

    def answered(self, number: int, response: FetchResponse) -> None: ...

    def connected(self) -> None:
        """A new session begins: the leader knows no positions yet."""


class LeaderSession:
    """Invariant: at most two fetches are in flight, and the second is sent only to end the first. Owned by the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node_id: int,
        leader_id: int,
        connect: Callable[[int], Awaitable[Connection]],
        broker_epoch: Callable[[], int],
        asker: FetchSource,
        log: Logger,
    ) -> None:
        self._loop = loop
        self._node_id = node_id
        self._leader_id = leader_id
        self._connect = connect
        self._broker_epoch = broker_epoch
        self._asker = asker
        self._log = log
        self._connection: Connection | None = None
        self._version = FETCH_VERSION
        self._id = 0
        self._epoch = 0
        self._number = 0
        self._in_flight: deque[tuple[int, float]] = deque()
        self._is_kicked = False
        self._is_closed = False
        self._connecting: asyncio.Task[None] | None = None
        self._losses = 0
        """Consecutive connections that ended before any response."""
        self._watch: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Connect, unless already connected or connecting."""
        if self._connecting is None and self._connection is None and not self._is_closed:
            self._connecting = self._loop.create_task(self._reach(), name=f"follow-node-{self._leader_id}")

    def close(self) -> None:
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._watch is not None:
            self._watch.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _reach(self) -> None:
        pause_s = PAUSE_S_MIN
        if self._losses > 1:
            # A starting leader accepts connections before it can answer requests.
            await asyncio.sleep(min(PAUSE_S_MIN * 2 ** (self._losses - 2), PAUSE_S_MAX))
        while True:
            try:
                connection = await self._connect(self._leader_id)
                self._version = connection.version(ApiKey.FETCH, FETCH_VERSION)
                break
            except (ClientError, OSError) as error:
                self._log.debug("leader_not_reached", error=str(error))
            except Exception:
                self._log.exception("leader_not_reached")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        self._connecting = None
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        self._connection = connection
        self._id = self._epoch = 0
        self._in_flight.clear()
        if self._watch is None:
            self._watch = self._loop.call_later(ANSWER_TIMEOUT_S / 2, self._check_answers)
        self._asker.connected()
        self.kick()

    # -- requests ------------------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Send a fetch in the next loop turn if one is due, so that it includes everything from this turn."""
        if not self._is_kicked:
            self._is_kicked = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_kicked = False
        connection = self._connection
        if connection is None:
            return
        in_flight = len(self._in_flight)
        has_due = self._asker.has_due()
        # The session has no id before the first response, so a second fetch cannot end the first until then.
        if in_flight and (in_flight >= IN_FLIGHT_MAX or not has_due or not self._id):
            return
        if not in_flight and self._asker.may_wait():
            return
        self._number += 1
        topics, forgotten = self._asker.named(self._number)
        request = FetchRequest(
            replica_id=self._node_id,
            replica_epoch=self._broker_epoch(),
            max_wait_ms=WAIT_MS if self._id else 0,
            min_bytes=1,
            max_bytes=RESPONSE_BYTES_MAX,
            session_id=self._id,
            session_epoch=self._epoch,
            topics=topics,
            forgotten=[(None, topic_id, [index]) for topic_id, index in forgotten] if self._id else [],
        )
        if self._id:
            self._epoch = 1 if self._epoch == SESSION_EPOCH_MAX else self._epoch + 1
        self._in_flight.append((self._number, self._loop.time()))
        future = connection.send(ApiKey.FETCH, self._version, write_fetch_request(self._version, request))
        future.add_done_callback(partial(self._answered, connection, self._number))

    def _check_answers(self) -> None:
        self._watch = self._loop.call_later(ANSWER_TIMEOUT_S / 2, self._check_answers)
        oldest_s = self._loop.time() - WAIT_MS / 1000 - ANSWER_TIMEOUT_S
        if self._in_flight and self._in_flight[0][1] < oldest_s and self._connection is not None:
            self._log.warning("leader_does_not_answer")
            self._connection.close()

    # -- responses -----------------------------------------------------------------------------------------------------

    def _answered(self, connection: Connection, number: int, future: asyncio.Future[memoryview]) -> None:
        error: BaseException | None = asyncio.CancelledError() if future.cancelled() else future.exception()
        if connection is not self._connection:
            return
        if error is None:
            try:
                response = read_fetch_response(self._version, future.result())
            except MalformedRequest as malformed:
                error = malformed
        if error is not None:
            self._lost(error)
            return
        self._in_flight = deque(sent for sent in self._in_flight if sent[0] != number)
        if response.error_code:
            self._refused(ErrorCode(response.error_code))
            return
        if not self._id:
            self._id, self._epoch = response.session_id, 1
        self._losses = 0
        self._asker.answered(number, response)
        self.kick()

    def _lost(self, error: BaseException) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if not self._is_closed:
            self._losses += 1
            say = self._log.info if self._losses == 1 else self._log.debug
            say("leader_connection_lost", error=str(error))
            self.open()

    def _refused(self, code: ErrorCode) -> None:
        """Start a new session after a top-level error: at once for a session error, otherwise after a pause."""
        connection, self._connection = self._connection, None
        is_over = code in SESSION_ERRORS
        if not is_over:
            self._log.info("leader_refused_fetch", error=code.name)
        if connection is not None:
            self._loop.call_later(0 if is_over else REFUSED_PAUSE_S, self._resume, connection)

    def _resume(self, connection: Connection) -> None:
        if self._is_closed or self._connection is not None:
            connection.close()
        elif connection.is_closed:
            self._lost(ConnectionLost("closed meanwhile"))
        else:
            self._begin(connection)
