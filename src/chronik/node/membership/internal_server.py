"""The internal listener: other nodes, once they have proven who they are."""

from __future__ import annotations

import asyncio

from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.envelopes import Envelopes
from chronik.node.membership.greeter import Greeter, PeerConnection
from chronik.node.membership.internal_api import (
    Call,
    Envelope,
    InternalKey,
    decode_call,
    decode_envelope,
    decode_hello,
    encode,
)
from chronik.node.membership.raft_service import RaftService
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Handler
from chronik.node.serving.connection import Connection, Reply, Request
from chronik.node.serving.server import Server
from chronik.observe.logging import Logger
from chronik.observe.metrics import ApiMetrics
from chronik.wire.api import ApiKey
from chronik.wire.errors import MalformedRequest

REQUESTS_MAX = 4096
"""So many requests of one peer may wait for their answers, fetches and batches of all its clients among them."""

FRAME_SLACK_BYTES = 1024 * 1024
IDLE_S_MAX = 24 * 60 * 60.0
"""Peers do not ask for much while all is quiet; a batch that meets a connection just being closed would be in doubt."""

KAFKA_APIS = (
    ApiKey.PRODUCE,
    ApiKey.FETCH,
    ApiKey.LIST_OFFSETS,
    ApiKey.OFFSET_FOR_LEADER_EPOCH,
    ApiKey.API_VERSIONS,
)
"""What peers ask for in Kafka's own protocol: forwarded batches, and what replicas need."""

NEEDS_LOGS = (ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.OFFSET_FOR_LEADER_EPOCH)

UNPROVEN_APIS = (InternalKey.HELLO, InternalKey.PROOF)
UNPROVEN_MAX = 128
"""Beyond that the oldest goes, not the newest: a node needs milliseconds for its proof, and strangers may stay."""
UNPROVEN_S_MAX = 5.0
UNPROVEN_FRAME_BYTES_MAX = 4096


class InternalServer(Server):
    """The connections of other nodes.

    Invariant: `_unproven` holds each open connection without a `peer_id`. Nothing but HELLO and PROOF is answered on
    it, its frames are small, and it ends soon.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        # A forwarded request may be longer than the client's by some bytes of its own.
        self.frame_bytes_max += FRAME_SLACK_BYTES
        self.idle_s_max = IDLE_S_MAX
        self.has_opened_logs = False
        """Set by the broker: before, peers are not served what needs logs."""
        self._unproven: dict[Connection, asyncio.TimerHandle] = {}

    def _api_metrics(self, api: Api) -> ApiMetrics:
        # Kept apart: what nodes ask each other is no client's request.
        return ApiMetrics(f"Internal{api.key.name}")

    def _new_connection(self) -> Connection:
        return PeerConnection(self, is_ordered=False, requests_max=REQUESTS_MAX)

    def _count_connections(self) -> None:
        """The gauge counts clients."""

    def connection_opened(self, connection: Connection) -> bool:
        if len(self._unproven) >= UNPROVEN_MAX:
            self._drop_unproven(next(iter(self._unproven)), f"{UNPROVEN_MAX} newer connections have proven nothing yet")
        if not super().connection_opened(connection):
            return False
        connection.frame_bytes_max = UNPROVEN_FRAME_BYTES_MAX
        late = f"no proof of the cluster secret within {UNPROVEN_S_MAX:g} s"
        self._unproven[connection] = self.loop.call_later(UNPROVEN_S_MAX, self._drop_unproven, connection, late)
        return True

    def connection_closed(self, connection: Connection) -> None:
        self._settle(connection)
        super().connection_closed(connection)

    def proven(self, connection: Connection) -> None:
        """The connection has its `peer_id`."""
        self._settle(connection)
        connection.frame_bytes_max = self.frame_bytes_max

    def _settle(self, connection: Connection) -> None:
        deadline = self._unproven.pop(connection, None)
        if deadline is not None:
            deadline.cancel()

    def _drop_unproven(self, connection: Connection, reason: str) -> None:
        self._settle(connection)
        self.refused(connection, reason)
        connection.abort()

    def run_request(self, connection: Connection, frame: memoryview) -> None:
        key = int.from_bytes(frame[:2], "big")
        if connection.peer_id is None and key not in UNPROVEN_APIS:
            raise MalformedRequest("a request of a node that has not proven the cluster secret")
        if key in NEEDS_LOGS and not self.has_opened_logs:
            # It has just started: the peer tries again in a moment.
            connection.close()
            return
        super().run_request(connection, frame)


class PeerApis:
    """What nodes call on each other, beside Kafka's own APIs. Owned by the loop."""

    def __init__(
        self,
        server: InternalServer,
        greeter: Greeter,
        raft: RaftService,
        controller: ControllerService,
        envelopes: Envelopes,
        log: Logger,
    ) -> None:
        self._server = server
        self._greeter = greeter
        self._raft = raft
        self._controller = controller
        self._envelopes = envelopes
        self._log = log

    def handlers(self) -> list[Handler]:
        return [
            Handler(Api(InternalKey.HELLO, (0, 0)), hot=self._hello),
            Handler(Api(InternalKey.PROOF, (0, 0)), hot=self._proof),
            Handler(Api(InternalKey.RAFT, (0, 0)), hot=self._raft_message),
            Handler(Api(InternalKey.CONTROLLER_CALL, (0, 0)), hot=self._controller_call),
            Handler(Api(InternalKey.ENVELOPE, (0, 0)), hot=self._envelope),
        ]

    def _hello(self, request: Request, reply: Reply) -> None:
        connection, body = _peer(request), bytes(request.frame[request.body_at :])
        if connection.peer_id is None:
            reply.send((self._greeter.challenge(body, connection),))
            return
        answer = self._greeter.greet(decode_hello(body), connection)
        reply.send((encode(answer),))
        if answer.refusal:
            connection.close()

    def _proof(self, request: Request, reply: Reply) -> None:
        connection = _peer(request)
        answer = self._greeter.prove(bytes(request.frame[request.body_at :]), connection)
        reply.send((encode(answer),))
        if connection.peer_id is None:
            connection.close()
        else:
            self._server.proven(connection)

    def _raft_message(self, request: Request, reply: Reply) -> None:
        self._raft.received(_peer_id(request), bytes(request.frame[request.body_at :]))
        reply.send_nothing()

    def _controller_call(self, request: Request, reply: Reply) -> None:
        call = decode_call(request.frame[request.body_at :])
        self._server.spawn(self._run_call(call, _peer_id(request), reply))

    async def _run_call(self, call: Call, peer_id: int, reply: Reply) -> None:
        reply.send((encode(await self._controller.answer(call, peer_id)),))

    def _envelope(self, request: Request, reply: Reply) -> None:
        envelope = decode_envelope(request.frame[request.body_at :])
        self._server.spawn(self._run_envelope(envelope, request, reply))

    async def _run_envelope(self, envelope: Envelope, request: Request, reply: Reply) -> None:
        try:
            answer = await self._envelopes.open(envelope, request)
        except MalformedRequest as error:
            self._server.refused(request.connection, str(error))
            request.connection.close()
            return
        except Exception:
            # Not even the error could be said: whoever asked must not wait for an answer that never comes.
            self._log.exception("envelope_failed", api=envelope.api_key, version=envelope.api_version)
            request.connection.abort()
            return
        reply.send((encode(answer),))


def _peer(request: Request) -> PeerConnection:
    connection = request.connection
    assert isinstance(connection, PeerConnection)
    return connection


def _peer_id(request: Request) -> int:
    """The node that has proven to have sent this."""
    peer_id = request.connection.peer_id
    assert peer_id is not None
    return peer_id
