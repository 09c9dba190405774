"""Connections to the other nodes: one permanent control link to each, and data connections on demand.

A control link carries Raft messages, controller calls and envelopes. Replica fetches and forwarded batches use separate
connections, so that data never delays a heartbeat. A lost link reconnects at once, then with increasing backoff. A
silent peer is disconnected after seconds, because TCP would take minutes to notice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import NamedTuple, TypeVar

from chronik.client.connection import Connection
from chronik.client.endpoint import Endpoint
from chronik.client.errors import ClientError, ConnectionLost, Refused, TlsFailed, Unreachable
from chronik.node.membership.cluster_secret import SECRET_NAME, SECRET_VARIABLE, ClusterSecret
from chronik.node.membership.internal_api import VERSION, HelloReply, InternalKey, decode_hello_reply, encode
from chronik.node.membership.peer_handshake import NONCE_BYTES, Caller, Identity
from chronik.node.runtime import Runtime
from chronik.node.serving.tls import NodeTls
from chronik.wire.errors import MalformedRequest

T = TypeVar("T")

CONTROL = "control"
CONNECT_TIMEOUT_S = 1.0

PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 1.0
KEEPALIVE_INTERVAL_S = 1.0
SILENCE_S_MAX = 4.0
"""If a HELLO stays unanswered this long, the connections to the peer are closed and their requests fail."""

QUEUED_MESSAGES_MAX = 64


class PeerState(Enum):
    CONNECTED = "connected"
    REFUSED = "refused"
    """No process listens at the address: the peer's process is gone."""
    REJECTED = "rejected"
    """The peer answers and refuses this node."""
    SILENT = "silent"


class PeerStatus(NamedTuple):
    """The state of a link. `since_s` uses the loop's clock; `reason` is one line for people, empty while connected."""

    state: PeerState
    since_s: float
    reason: str = ""


class Rejected(ClientError):
    """The peer rejected this node's HELLO; the message is the peer's reason."""


class Peers:
    """All other nodes that this node knows. Owned by the loop.

    A configured address overrides one that was learned from the peer itself or from the metadata.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: Identity,
        secret: ClusterSecret,
        on_refused: Callable[[int], None],
        tls: NodeTls | None = None,
    ) -> None:
        self.loop = runtime.loop
        self.random = runtime.env.random
        self.identity = identity
        self.log = runtime.log.bind(component="links")
        self._secret = secret
        self._tls = tls if runtime.config.security.internal_tls else None
        self.on_refused = on_refused
        """Called when no process listens at the address of a node."""
        self._configured = {
            peer.id: Endpoint.parse(peer.internal) for peer in runtime.config.peers if peer.id != identity.node_id
        }
        self._links: dict[int, Link] = {}
        self._data: dict[tuple[int, str], asyncio.Task[Connection]] = {}
        self._is_closed = False

    def start(self) -> None:
        for node_id, endpoint in sorted(self._configured.items()):
            self.learn(node_id, endpoint)

    def learn(self, node_id: int, endpoint: Endpoint) -> None:
        """Record the address of a peer, unless the configuration names another."""
        if node_id == self.identity.node_id or self._is_closed:
            return
        endpoint = self._configured.get(node_id, endpoint)
        link = self._links.get(node_id)
        if link is not None and link.endpoint == endpoint:
            link.poked.set()
            return
        if link is not None:
            link.close()
        self.close_data(node_id)
        self._links[node_id] = Link(self, node_id, endpoint)

    def probe(self, node_id: int) -> None:
        """Make the peer's link retry now instead of after its backoff."""
        link = self._links.get(node_id)
        if link is not None:
            link.poked.set()

    def forget(self, node_id: int) -> None:
        """Drop a node that has left the cluster."""
        if node_id in self._configured:
            return
        link = self._links.pop(node_id, None)
        if link is not None:
            link.close()
        self.close_data(node_id)

    def known(self) -> list[int]:
        return sorted(self._links)

    def status(self, node_id: int) -> PeerStatus:
        link = self._links.get(node_id)
        return PeerStatus(PeerState.SILENT, 0.0, "its address is unknown") if link is None else link.status

    def is_connected(self, node_id: int) -> bool:
        return self.status(node_id).state is PeerState.CONNECTED

    async def close(self) -> None:
        self._is_closed = True
        for link in self._links.values():
            link.close()
        for node_id, _ in list(self._data):
            self.close_data(node_id)

    def send(self, node_id: int, key: InternalKey, body: bytes) -> None:
        """Send a message that has no response, if possible. The full queue of a slow peer drops its oldest message."""
        link = self._links.get(node_id)
        if link is not None:
            link.send(key, body)

    async def call(self, node_id: int, key: InternalKey, body: bytes, timeout_s: float) -> memoryview:
        """Send a request; return the response. Unreachable: nothing was sent; ConnectionLost: the peer may have it."""
        link = self._links.get(node_id)
        if link is None:
            raise Unreachable(f"the address of node {node_id} is not known")
        return await link.call(key, body, timeout_s)

    async def connection(
        self, node_id: int, purpose: str = "fetch", timeout_s: float = CONNECT_TIMEOUT_S
    ) -> Connection:
        """Return the peer's connection for one purpose; open it if there is none. Raise Unreachable on failure."""
        task = self._data.get((node_id, purpose))
        if task is None or (task.done() and self.open_connection(node_id, purpose) is None):
            link = self._links.get(node_id)
            if link is None or self._is_closed:
                raise Unreachable(f"the address of node {node_id} is not known")
            task = self.loop.create_task(self.open(node_id, link.endpoint, purpose, timeout_s))
            # Retrieve the exception, because the caller may be gone: an unretrieved one is logged as an error.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._data[(node_id, purpose)] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and (caller is None or not caller.cancelling()):
                # The connection attempt was cancelled, not its caller.
                raise Unreachable(f"node {node_id} was dropped meanwhile") from None
            raise

    def open_connection(self, node_id: int, purpose: str) -> Connection | None:
        """Return the peer's connection for one purpose if it is already open."""
        task = self._data.get((node_id, purpose))
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        connection = task.result()
        return None if connection.is_closed else connection

    def close_data(self, node_id: int) -> None:
        for key in [key for key in self._data if key[0] == node_id]:
            connection = self.open_connection(*key)
            if connection is not None:
                connection.close()
            self._data.pop(key).cancel()

    async def open(self, node_id: int, endpoint: Endpoint, purpose: str, timeout_s: float) -> Connection:
        """Open a connection on which both ends have proven that they know the cluster secret.

        With `security.internal_tls` both also have a certificate of the authorities, the peer's one for its host.

        Raise Rejected if the peer refuses it or is not the intended node.
        """
        return await Connection.open(
            *endpoint,
            client_id=f"chronik-{self.identity.node_id}",
            timeout_s=timeout_s,
            ssl=None if self._tls is None else self._tls.contexts.dialed_peers,
            authenticate=lambda connection: self._authenticate(connection, node_id, purpose, timeout_s),
        )

    async def _authenticate(self, connection: Connection, node_id: int, purpose: str, timeout_s: float) -> None:
        """Prove the cluster secret to the peer, and verify the peer's proof. See `peer_handshake`."""
        hello = self.identity.hello(node_id, purpose, self.random.randbytes(NONCE_BYTES))
        caller = Caller(self._secret, hello)
        reply, proof = await self._ask(connection, InternalKey.HELLO, caller.hello, caller.prove, timeout_s)
        is_proven, refusal = await self._ask(connection, InternalKey.PROOF, proof, caller.confirms, timeout_s)
        if not is_proven:
            # This node's own message: an unauthenticated peer's text is not repeated.
            raise Rejected(
                f"node {node_id} at {connection.name} and this node have different cluster secrets: "
                f"copy {SECRET_NAME} from the data folder of a node of the cluster to this node's, "
                f"or set {SECRET_VARIABLE}; if it is not a node of this cluster, correct the peers"
            )
        if refusal:
            raise Rejected(refusal)
        if reply.node_id != node_id:
            raise Rejected(f"node {reply.node_id} answers at {connection.name}, not node {node_id}: correct the peers")
        self._check_cluster(connection, reply)

    async def check_alive(self, connection: Connection, node_id: int, purpose: str, timeout_s: float) -> None:
        """Check that an authenticated peer is alive and still in this cluster."""
        hello = encode(self.identity.hello(node_id, purpose))
        reply = await self._ask(connection, InternalKey.HELLO, hello, decode_hello_reply, timeout_s)
        if reply.refusal:
            raise Rejected(reply.refusal)
        self._check_cluster(connection, reply)

    async def _ask(
        self, connection: Connection, key: InternalKey, body: bytes, read: Callable[[bytes], T], timeout_s: float
    ) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return read(bytes(await connection.send(key, VERSION, body)))
        except TimeoutError:
            raise ConnectionLost(f"{connection.name} did not answer within {timeout_s:g} s") from None
        except MalformedRequest as error:
            raise Rejected(f"{connection.name} is not a node of this version: {error}") from None

    def _check_cluster(self, connection: Connection, reply: HelloReply) -> None:
        own_id = self.identity.cluster_id
        if own_id and reply.cluster_id and own_id != reply.cluster_id:
            raise Rejected(
                f"node {reply.node_id} at {connection.name} belongs to cluster {reply.cluster_id}, "
                f"this node to {own_id}: correct the peers"
            )


class Link:
    """Owned by the loop; its own task reconnects it. Invariant: `_connection` is authenticated and open, or None."""

    def __init__(self, peers: Peers, node_id: int, endpoint: Endpoint) -> None:
        self.node_id = node_id
        self.endpoint = endpoint
        self.status = PeerStatus(PeerState.SILENT, peers.loop.time(), "not connected yet")
        self._peers = peers
        self._loop = peers.loop
        self._connection: Connection | None = None
        self._queue: deque[tuple[InternalKey, bytes]] = deque(maxlen=QUEUED_MESSAGES_MAX)
        self._draining: asyncio.Task[None] | None = None
        self.poked = asyncio.Event()
        """Set it to connect now instead of after the backoff."""
        self._tried: asyncio.Future[None] = self._loop.create_future()
        """Done unless an attempt to connect is running."""
        self._task = self._loop.create_task(self._keep_connected(), name=f"link-{node_id}")

    def close(self) -> None:
        self._task.cancel()
        if self._draining is not None:
            self._draining.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if not self._tried.done():
            self._tried.set_result(None)

    def send(self, key: InternalKey, body: bytes) -> None:
        connection = self._connection
        if connection is not None and not self._queue and connection.is_writable:
            connection.send_unanswered(key, VERSION, body)
        elif connection is not None or not self._tried.done():
            self._queue.append((key, body))
            self._start_draining()

    async def call(self, key: InternalKey, body: bytes, timeout_s: float) -> memoryview:
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connected()
                return await connection.send(key, VERSION, body)
        except TimeoutError:
            raise ConnectionLost(f"node {self.node_id} did not answer within {timeout_s:g} s") from None

    async def _connected(self) -> Connection:
        """Return the open connection; wait for a running attempt, and raise Unreachable if that fails."""
        if self._connection is None:
            await asyncio.shield(self._tried)
        if self._connection is None:
            raise Unreachable(f"node {self.node_id} at {self.endpoint} cannot be reached: {self.status.reason}")
        return self._connection

    def _start_draining(self) -> None:
        if self._queue and self._connection is not None and self._draining is None:
            self._draining = self._loop.create_task(self._drain(self._connection), name=f"drain-{self.node_id}")

    async def _drain(self, connection: Connection) -> None:
        try:
            while self._queue and self._connection is connection:
                await connection.drained()
                while self._queue and connection.is_writable:
                    key, body = self._queue[0]
                    connection.send_unanswered(key, VERSION, body)
                    self._queue.popleft()
        except ClientError:
            self._queue.clear()
        finally:
            self._draining = None

    async def _keep_connected(self) -> None:
        pause_s = 0.0
        while True:
            self.poked.clear()
            if self._tried.done():
                self._tried = self._loop.create_future()
            opened_s = self._loop.time()
            error = await self._until_lost()
            self._report(error)
            if self._loop.time() - opened_s > PAUSE_S_MAX:
                # The link was up for a while: the next attempt shows whether the process is still running.
                pause_s = 0.0
                continue
            pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * pause_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s * (0.75 + self._peers.random.random() / 4)):
                    await self.poked.wait()

    async def _until_lost(self) -> Exception:
        """Open the connection and keep it until it is lost; return the error that ended or prevented it."""
        try:
            connection = await self._peers.open(self.node_id, self.endpoint, CONTROL, CONNECT_TIMEOUT_S)
        except ClientError as error:
            return error
        self._connection = connection
        self._set_status(PeerState.CONNECTED, "")
        self._peers.log.info("peer_connected", peer=self.node_id, address=str(self.endpoint))
        self._start_draining()
        try:
            while True:
                try:
                    async with asyncio.timeout(KEEPALIVE_INTERVAL_S):
                        return await connection.wait_closed()
                except TimeoutError:
                    await self._peers.check_alive(connection, self.node_id, CONTROL, SILENCE_S_MAX)
        except ClientError as error:
            if not connection.is_closed:
                # The peer no longer answers: the requests on its data connections must fail too.
                self._peers.close_data(self.node_id)
            return error
        finally:
            connection.close()
            self._connection = None

    def _report(self, error: Exception) -> None:
        state = PeerState.REJECTED if isinstance(error, Rejected) else PeerState.SILENT
        if isinstance(error, Refused):
            state = PeerState.REFUSED
        reason = str(error)
        needs_operator = isinstance(error, (Rejected, TlsFailed))
        if state is not self.status.state or (needs_operator and reason != self.status.reason):
            log = self._peers.log.error if needs_operator else self._peers.log.warning
            log("peer_not_connected", peer=self.node_id, address=str(self.endpoint), state=state.value, reason=reason)
        self._queue.clear()
        self._set_status(state, reason)
        if state is PeerState.REFUSED:
            self._peers.on_refused(self.node_id)

    def _set_status(self, state: PeerState, reason: str) -> None:
        since_s = self.status.since_s if state is self.status.state else self._loop.time()
        self.status = PeerStatus(state, since_s, reason)
        if not self._tried.done():
            self._tried.set_result(None)
