"""Mutual authentication of two nodes: each proves that it knows the cluster secret, without sending it.

    caller                                                answering node
    HELLO   its identity, the target node, its nonce  ->
                                                      <-  its identity, its nonce
    PROOF   mac(secret, CALLER, both messages)        ->
                                                      <-  mac(secret, ANSWERER, both messages), and any refusal

    mac(secret, role, hello, answer) = HMAC-SHA256(secret, label, role, hello, answer), each preceded by its length

`hello` and `answer` are the bytes as sent, so a proof covers everything in them: both nonces, node ids and
incarnations, the cluster id, the target node, the purpose and the caller's address. Fresh nonces from both sides
prevent replays, and the role prevents reflection: a proof is valid for one direction of one connection. The caller
proves first, so an unauthenticated caller obtains nothing from a node that it could test guessed secrets against.

The handshake shows that a node of the cluster opened the connection under the id that it claims. It does not protect
later messages: an attacker that can modify packets can take over a connection after its proof.

`PeerHandshake` authenticates the nodes that connect to the internal listener. It refuses a caller that does not know
the cluster secret, belongs to another cluster, looks for another node, or uses the node id of a process that is alive.
The refusal states what the operator must do. Both sides log it, once for each reason.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.node.membership.cluster_secret import SECRET_NAME, SECRET_VARIABLE, ClusterSecret
from chronik.node.membership.internal_api import (
    MARKERS,
    Hello,
    HelloReply,
    Proof,
    ProofReply,
    decode_hello,
    decode_hello_reply,
    decode_proof,
    decode_proof_reply,
    encode,
)
from chronik.node.runtime import Runtime
from chronik.node.serving.connection import Connection
from chronik.wire.errors import MalformedRequest

LABEL = b"chronik node to node 1"
"""Another version of these messages needs another label."""

NONCE_BYTES = 32

ALIVE_S = 2.5
"""A process that sent a HELLO within this time is alive: HELLO is repeated every second."""

REASONS_LOGGED_MAX = 1_000
STRANGERS_LOGGED_MAX = 10
STRANGERS_LOGGED_S = 60.0
"""Of the callers that do not know the secret, STRANGERS_LOGGED_MAX are logged in this time, each once."""


@dataclass(slots=True)
class Identity:
    """How this node identifies itself to other nodes: one process of one node.

    `incarnation` is new at each start; `internal` is its address for peers. `cluster_id` is empty until the node learns
    its first cluster's id, and never changes after that. Owned by the loop.
    """

    node_id: int
    incarnation: UUID
    internal: str
    cluster_id: str = ""

    def hello(self, target_node_id: int, purpose: str, nonce: bytes = b"") -> Hello:
        return Hello(self.cluster_id, self.node_id, self.incarnation, target_node_id, self.internal, purpose, nonce)


class Role(Enum):
    CALLER = b"caller"
    ANSWERER = b"answerer"


def mac(key: bytes, role: Role, hello: bytes, answer: bytes) -> bytes:
    parts = (LABEL, role.value, hello, answer)
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


class Caller:
    """The side that opened the connection. Single use: `hello` first, then `prove`, then `confirms`."""

    def __init__(self, secret: ClusterSecret, hello: Hello) -> None:
        self.hello = encode(hello)
        self._key = secret.proven
        self._answer = b""

    def prove(self, answer: bytes) -> tuple[HelloReply, bytes]:
        """Return the answering node and the PROOF for it. Raise MalformedRequest if `answer` is malformed."""
        reply = decode_hello_reply(answer)
        _check_nonce(reply.nonce)
        self._answer = answer
        return reply, encode(Proof(mac(self._key, Role.CALLER, self.hello, answer)))

    def confirms(self, answer: bytes) -> tuple[bool, str]:
        """Return whether the other side has proven itself too, and its refusal, which can be trusted only then."""
        reply = decode_proof_reply(answer)
        expected = mac(self._key, Role.ANSWERER, self.hello, self._answer)
        return hmac.compare_digest(expected, reply.mac), reply.refusal


class Answerer:
    """The side that accepted the connection, from the caller's first HELLO to its PROOF. Single use."""

    def __init__(self, secret: ClusterSecret, hello: bytes, reply: HelloReply) -> None:
        """`reply` is the answer, with this side's nonce. Raise MalformedRequest if `hello` is no first HELLO."""
        self.hello = decode_hello(hello)
        _check_nonce(self.hello.nonce)
        self.answer = encode(reply)
        self._secret = secret
        self._hello = hello

    def prove(self, proof: bytes) -> bytes | None:
        """Return this side's proof if the caller's proof is valid; None if the caller does not know the secret."""
        claimed = decode_proof(proof).mac
        for key in self._secret.accepted:
            if hmac.compare_digest(mac(key, Role.CALLER, self._hello, self.answer), claimed):
                return mac(key, Role.ANSWERER, self._hello, self.answer)
        return None


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise MalformedRequest(f"a first HELLO, or the answer to it, with a nonce of {len(nonce)} bytes")


class PeerConnection(Connection):
    """A connection accepted by the internal listener."""

    handshake: Answerer | None = None
    """Set between a node's first HELLO and its PROOF."""


@dataclass(slots=True)
class _PeerProcess:
    """One process of one peer, and its connections to this node."""

    incarnation: UUID
    heard_s: float
    connections: dict[Connection, None] = field(default_factory=dict)
    newest: dict[str, Connection] = field(default_factory=dict)
    """The newest connection for each purpose, until it is closed: requests may remain after its end of input."""


class PeerHandshake:
    """The answering side of all connections, and the peers that are connected. Owned by the loop.

    Only this class sets a connection's `peer_id`, after the caller's PROOF. Invariant: each node id has connections
    from at most one incarnation.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: Identity,
        secret: ClusterSecret,
        on_connected: Callable[[int, Endpoint], None],
        on_disconnected: Callable[[int], None],
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._random = runtime.env.random
        self._clock = runtime.loop.time
        self._log = runtime.log.bind(component="links")
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._processes: dict[int, _PeerProcess] = {}
        self._logged: dict[tuple[int, str], None] = {}
        self._strangers: dict[tuple[str, int], None] = {}
        self._strangers_since_s = self._clock()
        self._strangers_unlogged = 0

    def is_present(self, node_id: int) -> bool:
        """Return whether a process of that node holds a connection to this node."""
        process = self._processes.get(node_id)
        return process is not None and bool(process.connections)

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

    def answer_keepalive(self, hello: Hello, connection: Connection) -> HelloReply:
        """Answer a later HELLO, the keepalive of an authenticated peer."""
        identity, process = self._identity, self._processes.get(hello.node_id)
        is_same_process = process is not None and process.incarnation == hello.incarnation
        if hello.node_id != connection.peer_id or not is_same_process:
            refusal = f"this connection is not that of node {hello.node_id}: it was opened by node {connection.peer_id}"
            self._log_once(hello, refusal, connection.client_host)
        else:
            refusal = self._admit(hello, connection)
        return HelloReply(identity.cluster_id, identity.node_id, identity.incarnation, refusal)

    def _admit(self, hello: Hello, connection: Connection) -> str:
        """Admit the authenticated caller, or return the reason to refuse it."""
        if self._is_own(hello):
            # The page and the doctor query every node in one way, their own too. It is no peer.
            connection.peer_id = hello.node_id
            return ""
        refusal = self._refusal(hello)
        if refusal:
            self._log_once(hello, refusal, connection.client_host)
        else:
            connection.peer_id = hello.node_id
            self._add(hello, connection)
        return refusal

    def _is_own(self, hello: Hello) -> bool:
        """Return whether this process called itself."""
        identity = self._identity
        return (
            (hello.node_id, hello.incarnation)
            == (identity.node_id, identity.incarnation)
            == (
                hello.target_node_id,
                hello.incarnation,
            )
        )

    def _refusal(self, hello: Hello) -> str:
        identity = self._identity
        if hello.cluster_id and identity.cluster_id and hello.cluster_id != identity.cluster_id:
            return (
                f"node {identity.node_id} belongs to cluster {identity.cluster_id}, node {hello.node_id} to "
                f"{hello.cluster_id}: correct the peers of the misconfigured node, "
                "or give it an empty data folder to join this cluster"
            )
        if hello.node_id == identity.node_id:
            return (
                f"node id {hello.node_id} is used twice: give each node a node_id of its own, "
                "and list the other nodes in its peers"
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
        process = self._processes.get(hello.node_id)
        if process is None or process.incarnation == hello.incarnation or not process.connections:
            return ""
        if self._clock() - process.heard_s > ALIVE_S:
            return ""
        return (
            f"node id {hello.node_id} is used twice: another process with that id is alive; "
            f"stop one of the two, or give the one at {hello.internal} a node_id of its own"
        )

    def _add(self, hello: Hello, connection: Connection) -> None:
        node_id = hello.node_id
        process = self._processes.setdefault(node_id, _PeerProcess(hello.incarnation, self._clock()))
        if process.incarnation != hello.incarnation:
            for old in list(process.connections):
                old.abort()
            process = self._processes[node_id] = _PeerProcess(hello.incarnation, self._clock())
        process.heard_s = self._clock()
        if connection not in process.connections:
            process.connections[connection] = None
            # Not at close: a response that waits for the peer itself would keep a dead peer's connection open.
            connection.when_input_ends(lambda: self._ended(node_id, process, connection))
            self._replace(process, hello.purpose, connection)
            self._on_connected(node_id, Endpoint.parse(hello.internal))

    def _replace(self, process: _PeerProcess, purpose: str, connection: Connection) -> None:
        """Abort the peer's previous connection for the same purpose: the peer has abandoned it.

        A batch still held there would be appended after batches that the peer sent later.
        """
        old = process.newest.get(purpose)
        process.newest[purpose] = connection

        def closed() -> None:
            if process.newest.get(purpose) is connection:
                del process.newest[purpose]

        connection.when_closed(self, closed)
        if old is not None:
            old.abort()

    def drop_markers(self) -> None:
        """Abort all connections for markers, with their unread requests; their peers repeat what is not written.

        Call it before this node leads a partition: a marker that was sent here earlier may have been written by another
        leader since, and its transaction completed. Then it would end the producer's next transaction.
        """
        for process in self._processes.values():
            connection = process.newest.get(MARKERS)
            if connection is not None:
                connection.abort()

    def _ended(self, node_id: int, process: _PeerProcess, connection: Connection) -> None:
        process.connections.pop(connection, None)
        if not process.connections and self._processes.get(node_id) is process:
            self._on_disconnected(node_id)

    def _log_once(self, hello: Hello, refusal: str, host: str) -> None:
        key = (hello.node_id, refusal)
        if key not in self._logged and len(self._logged) < REASONS_LOGGED_MAX:
            self._logged[key] = None
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
            f"a caller that claims to be node {node_id} does not know the secret of this cluster: if it belongs here, "
            f"copy {SECRET_NAME} from the data folder of node {self._identity.node_id} to that of node {node_id}, "
            f"or set {SECRET_VARIABLE} there"
        )
        self._log.error("peer_refused", peer=node_id, host=host, reason=reason)
