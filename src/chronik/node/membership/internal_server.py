"""The internal listener: serves other nodes after they have authenticated."""

from __future__ import annotations

import asyncio
import ssl

from chronik.metadata.image import DEFAULT_LISTENER
from chronik.node.config import ListenerConfig, NodeConfig
from chronik.node.membership.cluster_member import ClusterMember
from chronik.node.membership.envelopes import Envelopes
from chronik.node.membership.internal_api import (
    Call,
    Envelope,
    InternalKey,
    decode_call,
    decode_envelope,
    decode_hello,
    encode,
)
from chronik.node.membership.peer_handshake import PeerConnection
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Handler
from chronik.node.serving.connection import Connection, Reply, Request
from chronik.node.serving.server import Server
from chronik.node.serving.tls import NodeTls, TlsContexts
from chronik.observe.logging import Logger
from chronik.observe.metrics import ApiMetrics
from chronik.wire.api import ApiKey
from chronik.wire.errors import MalformedRequest

REQUESTS_MAX = 4096
"""How many requests of one peer may be in flight, including fetches and batches of all its clients."""

FRAME_SLACK_BYTES = 1024 * 1024
IDLE_S_MAX = 24 * 60 * 60.0
"""Long: peers may have little to send, and a batch sent while the connection is being closed has an unknown outcome."""

NEEDS_LOGS = (
    ApiKey.PRODUCE,
    ApiKey.FETCH,
    ApiKey.LIST_OFFSETS,
    ApiKey.OFFSET_FOR_LEADER_EPOCH,
    ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.WRITE_TXN_MARKERS,
    ApiKey.METADATA,
    ApiKey.FIND_COORDINATOR,
    ApiKey.LIST_GROUPS,
    ApiKey.DESCRIBE_GROUPS,
    ApiKey.OFFSET_FETCH,
    ApiKey.LIST_TRANSACTIONS,
    ApiKey.DESCRIBE_TRANSACTIONS,
    ApiKey.DESCRIBE_PRODUCERS,
    ApiKey.DESCRIBE_CONFIGS,
    ApiKey.INITIALIZE_SHARE_GROUP_STATE,
    ApiKey.READ_SHARE_GROUP_STATE,
    ApiKey.WRITE_SHARE_GROUP_STATE,
    ApiKey.DELETE_SHARE_GROUP_STATE,
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
)
KAFKA_APIS = (*NEEDS_LOGS, ApiKey.API_VERSIONS)
"""The Kafka APIs that peers use: forwarded batches, the requests of replicas, and those of transactions and
share groups.

The page and the doctor of a node describe the cluster with the remaining ones: clients' listeners may require a log-in.
"""

UNPROVEN_APIS = (InternalKey.HELLO, InternalKey.PROOF)
UNPROVEN_MAX = 128
"""Beyond this the oldest is dropped: a node proves itself in milliseconds, while other callers may linger."""
UNPROVEN_S_MAX = 5.0
UNPROVEN_FRAME_BYTES_MAX = 4096


def internal_listener(config: NodeConfig) -> ListenerConfig:
    """Return the listener for nodes. Its name is that of `listen.kafka`, whose addresses nodes receive."""
    return ListenerConfig(
        DEFAULT_LISTENER, str(config.internal_endpoint), "SSL" if config.security.internal_tls else "PLAINTEXT"
    )


class InternalServer(Server):
    """The connections of other nodes.

    Invariant: `_unproven` holds each open connection without a `peer_id`. Only HELLO and PROOF are answered on it, its
    frames are small, and it is closed soon.
    """

    serves_clients = False

    def __init__(self, runtime: Runtime, tls: NodeTls | None = None) -> None:
        super().__init__(runtime, tls)
        # A forwarded request may be slightly longer than the client's request.
        self.frame_bytes_max += FRAME_SLACK_BYTES
        self.idle_s_max = IDLE_S_MAX
        self.has_opened_logs = False
        """Set by the broker. Until then, requests that need logs are not served."""
        self._unproven: dict[Connection, asyncio.TimerHandle] = {}

    def _api_metrics(self, api: Api) -> ApiMetrics:
        # Separate from the metrics of client requests.
        return ApiMetrics(f"Internal{api.key.name}")

    def _new_connection(self, listener: ListenerConfig) -> Connection:
        return PeerConnection(self, listener, is_ordered=False, requests_max=REQUESTS_MAX)

    def _tls_context(self, contexts: TlsContexts) -> ssl.SSLContext:
        return contexts.accepted_peers

    def _count_connections(self) -> None:
        """Do nothing: the gauge counts only clients."""

    def connection_opened(self, connection: Connection) -> bool:
        if len(self._unproven) >= UNPROVEN_MAX:
            self._drop_unproven(
                next(iter(self._unproven)), f"{UNPROVEN_MAX} newer connections have not authenticated yet"
            )
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
        """Lift the limits of a connection that now has its `peer_id`."""
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
            # This node has just started; the peer retries.
            connection.close()
            return
        super().run_request(connection, frame)


class PeerApis:
    """The APIs between nodes other than Kafka's. Owned by the loop."""

    def __init__(self, server: InternalServer, member: ClusterMember, envelopes: Envelopes, log: Logger) -> None:
        self._server = server
        self._handshake = member.handshake
        self._raft = member.raft
        self._controller = member.controller
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
            reply.send((self._handshake.challenge(body, connection),))
            return
        answer = self._handshake.answer_keepalive(decode_hello(body), connection)
        reply.send((encode(answer),))
        if answer.refusal:
            connection.close()

    def _proof(self, request: Request, reply: Reply) -> None:
        connection = _peer(request)
        answer = self._handshake.prove(bytes(request.frame[request.body_at :]), connection)
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
            # The error response itself failed. Abort, so that the peer does not wait forever.
            self._log.exception("envelope_failed", api=envelope.api_key, version=envelope.api_version)
            request.connection.abort()
            return
        reply.send((encode(answer),))


def _peer(request: Request) -> PeerConnection:
    connection = request.connection
    assert isinstance(connection, PeerConnection)
    return connection


def _peer_id(request: Request) -> int:
    """Return the authenticated sender."""
    peer_id = request.connection.peer_id
    assert peer_id is not None
    return peer_id
