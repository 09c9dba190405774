"""The connections to the other nodes: one control link to each, kept up, and data connections on demand.

A control link carries Raft messages, calls and envelopes. Replica fetches and forwarded batches have connections of
their own, so that no amount of data holds up a heartbeat. A link that is lost is opened again at once, then with a
growing pause; a peer that stays silent is given up after seconds, since TCP would take minutes to notice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from random import Random
from typing import NamedTuple

from chronik.client.connection import Connection
from chronik.client.errors import ClientError, ConnectionLost, Refused, Unreachable
from chronik.node.endpoint import Endpoint
from chronik.node.membership.cluster_secret import SECRET_NAME, SECRET_VARIABLE, ClusterSecret
from chronik.node.membership.handshake import NONCE_BYTES, Caller
from chronik.node.membership.identity import Identity
from chronik.node.membership.internal_api import VERSION, HelloReply, InternalKey, decode_hello_reply, encode
from chronik.observe.logging import Logger
from chronik.wire.errors import MalformedRequest

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


class Peers:
    """All other nodes that this one knows of. Owned by the loop.

    An address from the configuration wins over one that was learned from the peer itself or from the metadata.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        random: Random,
        identity: Identity,
        secret: ClusterSecret,
        log: Logger,
        on_refused: Callable[[int], None],
        configured: Mapping[int, Endpoint],
    ) -> None:
        self.loop = loop
        self.random = random
        self.identity = identity
        self.log = log
        self._secret = secret
        self._on_refused = on_refused
        self._configured = dict(configured)
        self._links: dict[int, Link] = {}
        self._data: dict[tuple[int, str], asyncio.Task[Connection]] = {}
        self._is_closed = False

    # -- who there is --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for node_id, endpoint in sorted(self._configured.items()):
            self.learn(node_id, endpoint)

    def learn(self, node_id: int, endpoint: Endpoint) -> None:
        """A peer can be reached at this address, unless the configuration names another."""
        if node_id == self.identity.node_id or self._is_closed:
            return
        endpoint = self._configured.get(node_id, endpoint)
        link = self._links.get(node_id)
        if link is not None and link.endpoint == endpoint:
            link.poke()
            return
        if link is not None:
            link.close()
        self._close_data(node_id)
        self._links[node_id] = Link(self, node_id, endpoint)

    def probe(self, node_id: int) -> None:
        """Something happened to the peer: its link tries now rather than after its pause."""
        link = self._links.get(node_id)
        if link is not None:
            link.poke()

    def forget(self, node_id: int) -> None:
        """The node has left the cluster."""
        if node_id in self._configured:
            return
        link = self._links.pop(node_id, None)
        if link is not None:
            link.close()
        self._close_data(node_id)

    def known(self) -> list[int]:
        return sorted(self._links)

    def status(self, node_id: int) -> PeerStatus:
        link = self._links.get(node_id)
        return PeerStatus(PeerState.SILENT, 0.0, "its address is not known") if link is None else link.status

    def state(self, node_id: int) -> PeerState:
        return self.status(node_id).state

    def is_connected(self, node_id: int) -> bool:
        return self.state(node_id) is PeerState.CONNECTED

    async def close(self) -> None:
        self._is_closed = True
        for link in self._links.values():
            link.close()
        for task in self._data.values():
            task.cancel()
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
        self._data.clear()

    # -- control -------------------------------------------------------------------------------------------------------

    def send(self, node_id: int, key: InternalKey, body: bytes) -> None:
        """Sends without an answer, if it can be; drops the oldest of what waits for a slow peer."""
        link = self._links.get(node_id)
        if link is not None:
            link.send(key, body)

    async def call(self, node_id: int, key: InternalKey, body: bytes, timeout_s: float) -> memoryview:
        """Asks and waits for the answer. Unreachable: nothing was sent; ConnectionLost: that is not known."""
        link = self._links.get(node_id)
        if link is None:
            raise Unreachable(f"the address of node {node_id} is not known")
        return await link.call(key, body, timeout_s)

    # -- data ----------------------------------------------------------------------------------------------------------

    async def connection(
        self, node_id: int, purpose: str = "fetch", timeout_s: float = CONNECT_TIMEOUT_S
    ) -> Connection:
        """The connection to a peer for one purpose, opened if there is none. Unreachable where it cannot be."""
        task = self._data.get((node_id, purpose))
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().is_closed)):
            link = self._links.get(node_id)
            if link is None or self._is_closed:
                raise Unreachable(f"the address of node {node_id} is not known")
            task = self.loop.create_task(self.open(node_id, link.endpoint, purpose, timeout_s))
            task.add_done_callback(_retrieve)
            self._data[(node_id, purpose)] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if task.cancelled() and (asking is None or not asking.cancelling()):
                # It was the connection that was given up, not who asked for it.
                raise Unreachable(f"node {node_id} was given up meanwhile") from None
            raise

    def open_connection(self, node_id: int, purpose: str) -> Connection | None:
        """The same, if it is open already."""
        task = self._data.get((node_id, purpose))
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        connection = task.result()
        return None if connection.is_closed else connection

    def _close_data(self, node_id: int) -> None:
        for key in [key for key in self._data if key[0] == node_id]:
            task = self._data.pop(key)
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                task.result().close()

    # -- for links -----------------------------------------------------------------------------------------------------

    async def open(self, node_id: int, endpoint: Endpoint, purpose: str, timeout_s: float) -> Connection:
        """A new connection whose two ends have proven themselves to each other.

        Rejected where the peer does not want it, or is not the one meant.
        """
        client_id = f"chronik-{self.identity.node_id}"
        return await Connection.open(
            *endpoint,
            client_id=client_id,
            timeout_s=timeout_s,
            authenticate=lambda connection: self._authenticate(connection, node_id, purpose, timeout_s),
        )

    async def _authenticate(self, connection: Connection, node_id: int, purpose: str, timeout_s: float) -> None:
        """Proves to the peer that this node knows the cluster secret, and has it prove the same. See `handshake`."""
        hello = self.identity.hello(node_id, purpose, self.random.randbytes(NONCE_BYTES))
        caller = Caller(self._secret, hello)
        try:
            reply, proof = caller.prove(await self._ask(connection, InternalKey.HELLO, caller.hello, timeout_s))
            is_proven, refusal = caller.confirms(await self._ask(connection, InternalKey.PROOF, proof, timeout_s))
        except MalformedRequest as error:
            raise Rejected(f"{connection.name} is no node of this version: {error}") from None
        if not is_proven:
            # In our own words: those of a stranger are not repeated.
            raise Rejected(
                f"node {node_id} at {connection.name} and this node have different cluster secrets: "
                f"copy {SECRET_NAME} from the data folder of a node of the cluster to this node's, "
                f"or set {SECRET_VARIABLE}; if it is no node of this cluster, correct the peers"
            )
        if refusal:
            raise Rejected(refusal)
        if reply.node_id != node_id:
            raise Rejected(f"node {reply.node_id} answers at {connection.name}, not node {node_id}: correct the peers")
        self._check_cluster(connection, reply)

    async def greet(self, connection: Connection, node_id: int, purpose: str, timeout_s: float) -> None:
        """Has a peer that was proven show that it is alive, and still of this cluster."""
        hello = encode(self.identity.hello(node_id, purpose))
        try:
            reply = decode_hello_reply(await self._ask(connection, InternalKey.HELLO, hello, timeout_s))
        except MalformedRequest as error:
            raise Rejected(f"{connection.name} is no node of this version: {error}") from None
        if reply.refusal:
            raise Rejected(reply.refusal)
        self._check_cluster(connection, reply)

    async def _ask(self, connection: Connection, key: InternalKey, body: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return bytes(await connection.send(key, VERSION, body))
        except TimeoutError:
            raise ConnectionLost(f"{connection.name} did not answer within {timeout_s:g} s") from None

    def _check_cluster(self, connection: Connection, reply: HelloReply) -> None:
        own_id = self.identity.cluster_id
        if own_id and reply.cluster_id and own_id != reply.cluster_id:
            raise Rejected(
                f"node {reply.node_id} at {connection.name} belongs to cluster {reply.cluster_id}, "
                f"this node to {own_id}: correct the peers"
            )

    def refused(self, node_id: int) -> None:
        self._on_refused(node_id)

    def silent(self, node_id: int) -> None:
        """What is on the way to a peer that answers no more is not waited for."""
        self._close_data(node_id)


def _retrieve(task: asyncio.Task[Connection]) -> None:
    """Whoever asked for the connection may be gone: its failure is no unhandled error."""
    if not task.cancelled():
        task.exception()


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
