"""Authenticates the nodes that connect to the internal listener, and tracks which peers are connected.

Only this module sets a connection's `peer_id`, after the caller's PROOF. It refuses a caller that does not know the
cluster secret, belongs to another cluster, looks for another node, or uses the node id of a process that is alive. The
refusal states what the operator must do. Both sides log it, once for each reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from uuid import UUID

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.node.membership.cluster_secret import SECRET_NAME, SECRET_VARIABLE, ClusterSecret
from chronik.node.membership.handshake import NONCE_BYTES, Answerer
from chronik.node.membership.identity import Identity
from chronik.node.membership.internal_api import Hello, HelloReply, ProofReply
from chronik.node.serving.connection import Connection
from chronik.observe.logging import Logger
from chronik.wire.errors import MalformedRequest

ALIVE_S = 2.5
"""A process that sent a HELLO within this time is alive: HELLO is repeated every second."""

REASONS_LOGGED_MAX = 1_000
STRANGERS_LOGGED_MAX = 10
STRANGERS_LOGGED_S = 60.0
"""Of the callers that do not know the secret, STRANGERS_LOGGED_MAX are logged in this time, each once."""


class PeerConnection(Connection):
    """A connection accepted by the internal listener."""

    handshake: Answerer | None = None
    """Set between a node's first HELLO and its PROOF."""


@dataclass(slots=True)
class _Present:
    """One process of one peer, and its connections to this node."""

    incarnation: UUID
    heard_s: float
    connections: dict[Connection, None] = field(default_factory=dict)
    newest: dict[str, Connection] = field(default_factory=dict)
    """The newest connection for each purpose, until it is closed: requests may remain after its end of input."""


class Greeter:
    """Owned by the loop. Invariant: each node id has connections from at most one incarnation."""

    def __init__(
        self,
        identity: Identity,
        secret: ClusterSecret,
        random: Random,
        clock: Callable[[], float],
        log: Logger,
        on_greeting: Callable[[int, Endpoint], None],
        on_gone: Callable[[int], None],
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._random = random
        self._clock = clock
        self._log = log
        self._on_greeting = on_greeting
        self._on_gone = on_gone
        self._present: dict[int, _Present] = {}
        self._logged: dict[tuple[int, str], None] = {}
        self._strangers: dict[tuple[str, int], None] = {}
        self._strangers_since_s = clock()
        self._strangers_unlogged = 0

    def is_present(self, node_id: int) -> bool:
        """Return whether a process of that node holds a connection to this node."""
        present = self._present.get(node_id)
        return present is not None and bool(present.connections)

    def incarnation(self, node_id: int) -> UUID | None:
        present = self._present.get(node_id)
        return None if present is None else present.incarnation

    def challenge(self, body: bytes, connection: PeerConnection) -> bytes:
        """Answer the first HELLO of a connection with the challenge for the caller's proof."""
        if connection.handshake is not None:
            raise MalformedRequest("a second HELLO before the proof of the first")
        identity = self._identity
        nonce = self._random.randbytes(NONCE_BYTES)
        reply = HelloReply(identity.cluster_id, identity.node_id, identity.incarnation, nonce=nonce)
        connection.handshake = Answerer(self._secret, body, reply)
        return connection.handshake.answer

    def prove(self, body: bytes, connection: PeerConnection) -> ProofReply:
        """Answer a PROOF. If `peer_id` is not set afterwards, the caller may send nothing else."""
        handshake, connection.handshake = connection.handshake, None
        if handshake is None:
            raise MalformedRequest("a PROOF without a HELLO")
        hello, mac = handshake.hello, handshake.prove(body)
        if mac is None:
            self._log_stranger(hello.node_id, connection.client_host)
            return ProofReply()
        return ProofReply(mac, self._admit(hello, connection))

    def greet(self, hello: Hello, connection: Connection) -> HelloReply:
        """Answer a later HELLO, the keepalive of an authenticated peer."""
        identity = self._identity
        if (hello.node_id, hello.incarnation) != (connection.peer_id, self.incarnation(hello.node_id)):
            refusal = f"this connection is not that of node {hello.node_id}: it was opened by node {connection.peer_id}"
            self._log_once(hello, refusal, connection.client_host)
        else:
            refusal = self._admit(hello, connection)
        return HelloReply(identity.cluster_id, identity.node_id, identity.incarnation, refusal)

    def _admit(self, hello: Hello, connection: Connection) -> str:
        """Admit the authenticated caller, or return the reason to refuse it."""
        refusal = self._refusal(hello)
        if refusal:
            self._log_once(hello, refusal, connection.client_host)
        else:
            connection.peer_id = hello.node_id
            self._note(hello, connection)
        return refusal

    def _refusal(self, hello: Hello) -> str:
        identity = self._identity
        if hello.cluster_id and identity.cluster_id and hello.cluster_id != identity.cluster_id:
            return (
                f"node {identity.node_id} belongs to cluster {identity.cluster_id}, node {hello.node_id} to "
                f"{hello.cluster_id}: correct the peers of the one that is in the wrong place, "
                "or give it an empty data folder to join this cluster"
            )
        if hello.node_id == identity.node_id:
            return (
                f"node id {hello.node_id} is used twice: give each node a node_id of its own, "
                "and in its peers name the others"
            )
        if hello.target_node_id != identity.node_id:
            return (
                f"node {identity.node_id} answers at {identity.internal}, where node {hello.node_id} looks for "
                f"node {hello.target_node_id}: correct the peers of node {hello.node_id}"
            )
        try:
            Endpoint.parse(hello.internal)
        except EndpointError as error:
            return f"node {hello.node_id} names no address where it can be reached: {error}"
        present = self._present.get(hello.node_id)
        if present is None or present.incarnation == hello.incarnation or not present.connections:
            return ""
        if self._clock() - present.heard_s > ALIVE_S:
            return ""
        return (
            f"node id {hello.node_id} is used twice: another process with that id is alive; "
            f"stop one of the two, or give the one at {hello.internal} a node_id of its own"
        )

    def _note(self, hello: Hello, connection: Connection) -> None:
        node_id = hello.node_id
        present = self._present.get(node_id)
        if present is None or present.incarnation != hello.incarnation:
            if present is not None:
                for old in list(present.connections):
                    old.abort()
            present = self._present[node_id] = _Present(hello.incarnation, self._clock())
        present.heard_s = self._clock()
        if connection not in present.connections:
            present.connections[connection] = None
            known = present
            # Not at close: a response that waits for the peer itself would keep a dead peer's connection open.
            connection.when_input_ends(lambda: self._ended(node_id, known, connection))
            self._replace(present, hello.purpose, connection)
            self._on_greeting(node_id, Endpoint.parse(hello.internal))

    def _replace(self, present: _Present, purpose: str, connection: Connection) -> None:
        """Abort the peer's previous connection for the same purpose: the peer has abandoned it.

        A batch still held there would be appended after batches that the peer sent later.
        """
        old = present.newest.get(purpose)
        present.newest[purpose] = connection

        def closed() -> None:
            if present.newest.get(purpose) is connection:
                del present.newest[purpose]

        connection.when_closed(self, closed)
        if old is not None:
            old.abort()

    def _ended(self, node_id: int, present: _Present, connection: Connection) -> None:
        present.connections.pop(connection, None)
        if not present.connections and self._present.get(node_id) is present:
            self._on_gone(node_id)

    def _log_once(self, hello: Hello, refusal: str, host: str) -> None:
        if (hello.node_id, refusal) not in self._logged and len(self._logged) < REASONS_LOGGED_MAX:
            self._logged[(hello.node_id, refusal)] = None
            self._log.error("peer_refused", peer=hello.node_id, host=host, reason=refusal)

    def _log_stranger(self, node_id: int, host: str) -> None:
        """Like `_log_once`, but rate-limited: an unauthenticated caller may claim any node id and call forever."""
        if self._clock() - self._strangers_since_s >= STRANGERS_LOGGED_S:
            if self._strangers_unlogged:
                self._log.warning("peers_refused", count=self._strangers_unlogged, reason="no cluster secret")
            self._strangers.clear()
            self._strangers_since_s = self._clock()
            self._strangers_unlogged = 0
        if (host, node_id) in self._strangers:
            return
        if len(self._strangers) >= STRANGERS_LOGGED_MAX:
            self._strangers_unlogged += 1
            return
        self._strangers[(host, node_id)] = None
        reason = (
            f"a caller that says it is node {node_id} does not know the secret of this cluster: if it belongs here, "
            f"copy {SECRET_NAME} from the data folder of node {self._identity.node_id} to that of node {node_id}, "
            f"or set {SECRET_VARIABLE} there"
        )
        self._log.error("peer_refused", peer=node_id, host=host, reason=reason)
