"""The internal listener: other nodes, once they have said who they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronik.node.api import Api, Reply, Request
from chronik.node.connection import Connection
from chronik.node.internal_api import (
    InternalKey,
    decode_call,
    decode_envelope,
    decode_hello,
    encode,
)
from chronik.node.server import Server
from chronik.observe.metrics import ApiMetrics
from chronik.wire.api import ApiKey
from chronik.wire.errors import MalformedRequest

if TYPE_CHECKING:
    from chronik.node.broker import Broker
    from chronik.node.internal_api import Call, Envelope

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
BEFORE_HELLO = (InternalKey.HELLO, ApiKey.API_VERSIONS)


class InternalServer(Server):
    """The connections of other nodes. Nothing but HELLO is answered on a connection that has not said it."""

    def __init__(self, broker: Broker, apis: dict[int, Api]) -> None:
        super().__init__(broker, {**{key: apis[key] for key in KAFKA_APIS}, **{api.key: api for api in INTERNAL_APIS}})
        # A forwarded request may be longer than the client's by some bytes of its own.
        self.frame_bytes_max += FRAME_SLACK_BYTES
        self.idle_s_max = IDLE_S_MAX

    def _api_metrics(self, api: Api) -> ApiMetrics:
        # Kept apart: what nodes ask each other is no client's request.
        return ApiMetrics(f"Internal{api.key.name}")

    def _new_connection(self) -> Connection:
        return Connection(self, is_ordered=False, requests_max=REQUESTS_MAX)

    def _count_connections(self) -> None:
        """The gauge counts clients."""

    def run_request(self, connection: Connection, frame: memoryview) -> None:
        key = int.from_bytes(frame[:2], "big")
        if connection.peer_id is None and key not in BEFORE_HELLO:
            raise MalformedRequest("a request of a node that has not said HELLO")
        if key in NEEDS_LOGS and not self.broker.has_opened_logs:
            # It has just started: the peer tries again in a moment.
            connection.close()
            return
        super().run_request(connection, frame)

    async def run_call(self, call: Call, reply: Reply) -> None:
        reply.send((encode(await self.broker.controller.answer(call)),))

    async def run_envelope(self, envelope: Envelope, request: Request, reply: Reply) -> None:
        try:
            answer = await self.broker.envelopes.open(envelope, request)
        except MalformedRequest as error:
            self.refused(request.connection, str(error))
            request.connection.close()
            return
        except Exception:
            # Not even the error could be said: whoever asked must not wait for an answer that never comes.
            self.broker.log.exception("envelope_failed", api=envelope.api_key, version=envelope.api_version)
            request.connection.abort()
            return
        reply.send((encode(answer),))


def _hello(broker: Broker, request: Request, reply: Reply) -> None:
    answer = broker.greeter.greet(decode_hello(request.frame[request.body_at :]), request.connection)
    reply.send((encode(answer),))
    if answer.refusal:
        request.connection.close()


def _raft(broker: Broker, request: Request, reply: Reply) -> None:
    peer_id = request.connection.peer_id
    assert peer_id is not None
    broker.raft.received(peer_id, bytes(request.frame[request.body_at :]))
    reply.send_nothing()


def _controller_call(broker: Broker, request: Request, reply: Reply) -> None:
    call = decode_call(request.frame[request.body_at :])
    broker.internal_server.spawn(broker.internal_server.run_call(call, reply))


def _envelope(broker: Broker, request: Request, reply: Reply) -> None:
    envelope = decode_envelope(request.frame[request.body_at :])
    broker.internal_server.spawn(broker.internal_server.run_envelope(envelope, request, reply))


INTERNAL_APIS = (
    Api(InternalKey.HELLO, (0, 0), hot=_hello),
    Api(InternalKey.RAFT, (0, 0), hot=_raft),
    Api(InternalKey.CONTROLLER_CALL, (0, 0), hot=_controller_call),
    Api(InternalKey.ENVELOPE, (0, 0), hot=_envelope),
)
