"""The node that is fuzzed: the real broker on a simulated machine, without a network.

Virtual time makes a wait of minutes free. Everything that happens follows from the seed and the inputs, so that a
finding can be replayed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from uuid import UUID

from chronik.authentication.sasl import PLAIN
from chronik.authorization.acls import ANONYMOUS
from chronik.local.certificates import create_authority
from chronik.node.broker import Broker
from chronik.node.config import Authorization, ListenerConfig, NodeConfig, Sasl, Security, Tls
from chronik.node.membership.internal_api import InternalKey
from chronik.node.membership.peer_handshake import Caller
from chronik.node.serving.authentication import REAUTHENTICATION_INTERVAL_S_MIN
from chronik.node.serving.connection import Connection
from chronik.storage.disk import Buffer
from chronik.testing.fuzz import BrokenPromise
from chronik.testing.fuzz.samples import CLIENT_ID, FUZZED_TOPIC, PEER_NONCE, framed, hello
from chronik.testing.fuzz.secured import (
    AUTHENTICATE_VERSION,
    MECHANISMS,
    TlsPeer,
    authenticate,
    credential_request,
    first_message,
    handshake,
)
from chronik.testing.fuzz.ways import Way
from chronik.testing.sim.host import Host, release
from chronik.testing.sim.network import Network
from chronik.testing.sim.node import SimNode, node_config
from chronik.testing.sim.world import World
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey, response_header_is_flexible
from chronik.wire.batch import check_batches, decode_batch, encode_batch
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, read_fetch_response, write_fetch_request
from chronik.wire.primitives import skip_tags
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

KEPT_TOPIC = "kept"
ADDRESS = "10.0.0.1"
CLIENT = ("10.0.9.9", 40_000)
KAFKA_PORT, INTERNAL_PORT = 9092, 5092
SECURED = {"SASL_PLAINTEXT": 9192, "SSL": 9292, "SASL_SSL": 9392}
"""The further listeners, by protocol."""
PIECES_MAX = 100
START_S_MAX = 60.0
CALL_S_MAX = 10.0
PRODUCE_VERSION, FETCH_VERSION = 9, 12
FETCH_BYTES = 1 << 20


class FuzzTransport(asyncio.Transport):
    """The transport of one connection. Delivers its data in pieces, as fast as the protocol accepts them.

    `is_lost` is set once the protocol was notified of the loss, `was_closed` once the node has closed the connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], asyncio.BaseProtocol],
        data: bytes = b"",
        way: Way = Way(),
    ) -> None:
        super().__init__({"peername": CLIENT, "sockname": CLIENT})
        self.written = bytearray()
        self.peer: TlsPeer | None = None
        """The client's side of TLS, once its handshake is done."""
        self.is_lost = False
        self.was_closed = False
        """Whether the node closed the connection, including in response to the end of input."""
        self._loop = loop
        self._factory = factory
        self.end_was_seen = False
        self._is_reading = True
        self._is_due = False
        self.protocol: asyncio.BufferedProtocol
        self.connection: Connection | None = None
        """The protocol, or what is inside its TLS."""
        self._set(data, way)
        loop.call_soon_threadsafe(self._open)

    def _set(self, data: bytes, way: Way) -> None:
        self._data = data
        self._at = 0
        self._piece_bytes = max(way.piece_bytes, len(data) // PIECES_MAX) if way.piece_bytes else len(data)
        self._ends_at_once = way.ends_at_once

    @property
    def is_settled(self) -> bool:
        """Whether nothing more happens by itself: all input was read and answered, or the connection has ended."""
        if self.is_lost:
            return True
        all_read = self._at >= len(self._data) and (self.end_was_seen or not self._ends_at_once)
        connection = self.connection
        return connection is not None and all_read and self._is_reading and not connection.has_unanswered

    def send(self, data: bytes, way: Way = Way()) -> None:
        """Send more data on the same connection, encrypted unless it is raw."""
        self._set(data if self.peer is None or way.is_raw else self.peer.encrypt(data), way)
        self._loop.call_soon_threadsafe(self._schedule)

    def take(self) -> bytes:
        """Return what the node has sent since the last call, decrypted."""
        data = bytes(self.written)
        self.written.clear()
        return data if self.peer is None else self.peer.decrypt(data)

    def lose(self) -> None:
        """Disconnect the client abruptly."""
        self._loop.call_soon_threadsafe(self._lose, ConnectionResetError("the client went away"))

    def _open(self) -> None:
        protocol = self._factory()
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self.protocol = protocol
        inner = getattr(protocol, "protocol", protocol)
        assert isinstance(inner, Connection)
        self.connection = inner
        protocol.connection_made(self)
        self._read()

    def _schedule(self) -> None:
        is_more = self._at < len(self._data) or (self._ends_at_once and not self.end_was_seen)
        if is_more and self._is_reading and not self._is_due and not self.is_lost and not self.was_closed:
            self._is_due = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_due = False
        if not self._is_reading or self.is_lost or self.was_closed:
            return
        if self._at < len(self._data):
            buffer = memoryview(self.protocol.get_buffer(-1))
            size = min(self._piece_bytes, len(self._data) - self._at, len(buffer))
            buffer[:size] = self._data[self._at : self._at + size]
            self._at += size
            self.protocol.buffer_updated(size)
            self._schedule()
        elif self._ends_at_once and not self.end_was_seen:
            self.end_was_seen = True
            if not self.protocol.eof_received():
                self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.protocol.connection_lost(error)

    # -- asyncio.Transport ---------------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        if not self.is_lost and not self.was_closed:
            self.written += data

    def close(self) -> None:
        if not self.was_closed:
            self.was_closed = True
            self._loop.call_soon(self._lose, None)

    abort = close

    def is_closing(self) -> bool:
        return self.was_closed

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._schedule()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore the limits: every write is accepted at once."""

    def get_write_buffer_size(self) -> int:
        return 0


class WatchedNode(SimNode):
    """Counts log events. A line with a traceback is an unexpected exception."""

    def __init__(self, host: Host, config: NodeConfig) -> None:
        super().__init__(host, config)
        self.events: Counter[str] = Counter()

    def _logged(self, line: str) -> None:
        super()._logged(line)
        event = json.loads(line)
        self.events[event["event"]] += 1
        if "traceback" in event:
            self.world.violated(f"{event['event']}: {event.get('error')}\n{event['traceback']}")


class FuzzedNode:
    """One node with a topic that inputs refer to, and another topic whose records must survive any input."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self._network = Network(self.world)
        self._host = Host(self.world, self._network, "node-1", ADDRESS)
        self._host.disk.usual_sync_s, self._host.disk.cold_share = 50e-6, 0.05
        self._certificates = tempfile.TemporaryDirectory(prefix="chronik-fuzz-certificates-")
        folder = self._certificates.name
        create_authority(folder).issue(folder, "node", [ADDRESS])
        config = node_config(
            1,
            self._host,
            auto_create_topics=False,
            group_initial_rebalance_delay_ms=0,
            group_min_session_timeout_ms=1,
            group_max_session_timeout_ms=30_000,
            group_max_size=3,
            retention_check_interval_ms=5_000,
            compaction_check_interval_ms=5_000,
            recovery_point_interval_ms=5_000,
            security=Security(insecure=True),
            listeners=tuple(
                ListenerConfig(f"L{port}", f"{ADDRESS}:{port}", protocol)  # type: ignore[arg-type]
                for protocol, port in SECURED.items()
            ),
            tls=Tls(
                f"{folder}/node.pem", f"{folder}/node.key", authorities=f"{folder}/ca.pem", client_auth="requested"
            ),
            sasl=Sasl(MECHANISMS, failure_delay_ms=0),  # type: ignore[arg-type]
            authorization=Authorization(True, (ANONYMOUS,), allow_everyone_if_no_acl_found=True),
        )
        self.node = WatchedNode(self._host, config)
        self.kept: list[bytes] = []
        """The acknowledged records of the healthy client; a record's index is its offset."""
        self.start()
        for topic in (FUZZED_TOPIC, KEPT_TOPIC):
            self._create(topic)
        self.call(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, credential_request())
        topic_id = self.topic_id(FUZZED_TOPIC)
        assert topic_id is not None
        self.fuzzed_id = topic_id

    @property
    def broker(self) -> Broker:
        assert self.node.broker is not None
        return self.node.broker

    def topic_id(self, name: str) -> UUID | None:
        topic = self.broker.image.topics.get(name)
        return None if topic is None else topic.id

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.node.start()
        if not self.until(lambda: self.node.is_ready, START_S_MAX):
            raise BrokenPromise(f"the node does not become ready:\n{self._last_lines()}")

    def release(self) -> None:
        release([self._host])
        self._certificates.cleanup()

    def until(self, is_over: Callable[[], bool], within_s: float) -> bool:
        """Run until `is_over` or the timeout; raise if a promise was broken meanwhile."""
        reached = self.world.run(self.world.now + within_s, is_over)
        if self.world.violation is not None:
            raise BrokenPromise(self.world.violation)
        return reached

    def _last_lines(self) -> str:
        return "\n".join(list(self.node.log_lines)[-5:])

    # -- connections ---------------------------------------------------------------------------------------------------

    def connect(self, data: bytes, way: Way = Way()) -> FuzzTransport:
        """Open a connection that sends `data`, after the handshakes and the authentication of its way."""
        protocol = ("SASL_" if way.uses_sasl else "") + ("SSL" if way.uses_tls else "PLAINTEXT")
        port = INTERNAL_PORT if way.is_internal else SECURED.get(protocol, KAFKA_PORT)
        listener = self._network.listener(ADDRESS, port)
        process = self._host.process
        if listener is None or process is None:
            raise BrokenPromise("the node does not listen any more")
        if way.is_internal and way.is_proven:
            caller = Caller(self.broker.member.handshake._secret, hello(PEER_NONCE))
            first = framed(InternalKey.HELLO, 0, caller.hello).frame
            transport = FuzzTransport(process.loop, listener.factory, first)
            _, proof = caller.prove(self._answer(transport))
            transport.send(framed(InternalKey.PROOF, 0, proof).frame)
            if caller.confirms(self._answer(transport)) != (True, ""):
                raise BrokenPromise("a peer that knows the secret is refused")
            transport.send(data)
            return transport
        encrypts = way.uses_tls and (way.is_proven or not way.is_raw)
        authenticates = way.uses_sasl and way.is_proven and not way.is_raw
        if not encrypts and not authenticates:
            return FuzzTransport(process.loop, listener.factory, data, way)
        transport = FuzzTransport(process.loop, listener.factory)
        if encrypts:
            self._encrypt(transport)
        if authenticates:
            self._authenticate(transport)
        transport.send(data, way)
        return transport

    def _encrypt(self, transport: FuzzTransport) -> None:
        peer, received = TlsPeer(), b""
        while not peer.is_done:
            transport.send(peer.shake(received))
            if not self.until(lambda: transport.is_settled, CALL_S_MAX) or transport.is_lost:
                raise BrokenPromise(f"a TLS handshake fails: {self._last_lines()}")
            received = transport.take()
        transport.peer = peer
        peer.decrypt(received)

    def _authenticate(self, transport: FuzzTransport) -> None:
        transport.send(handshake(PLAIN))
        self._answer(transport)
        transport.send(authenticate(first_message(PLAIN)))
        answer = memoryview(self._answer(transport))
        body = bytes(answer[skip_tags(answer, 0) :])
        answered = messages.read_response(ApiKey.SASL_AUTHENTICATE, AUTHENTICATE_VERSION, body)
        if answered.error_code is not ErrorCode.none:
            raise BrokenPromise(f"a client with the right password is refused: {answered}")
        # From now on the client may authenticate again.
        self.until(lambda: False, REAUTHENTICATION_INTERVAL_S_MIN)

    def _answer(self, transport: FuzzTransport) -> bytes:
        """Return the body of the one response that a peer waits for."""
        if not self.until(lambda: transport.is_settled, CALL_S_MAX) or not transport.written:
            raise BrokenPromise(f"a handshake is not answered: {self._last_lines()}")
        return transport.take()[8:]

    def call(self, key: int, version: int, body: bytes) -> memoryview:
        """Send a healthy client's request, which must be answered."""
        request = frames.write_request(key, version, 1, CLIENT_ID, body)
        transport = self.connect(request)
        if not self.until(lambda: transport.is_settled, CALL_S_MAX):
            raise BrokenPromise(f"a healthy client gets no answer to API {key}")
        answer = memoryview(bytes(transport.written))[8:]
        if not transport.written:
            raise BrokenPromise(f"a healthy client's connection was closed at API {key}: {self._last_lines()}")
        transport.lose()
        return answer[skip_tags(answer, 0) :] if response_header_is_flexible(key, version) else answer

    # -- the healthy client --------------------------------------------------------------------------------------------

    def keep_one(self) -> None:
        """Produce one more record; it must survive once it is acknowledged."""
        value = b"kept-%d" % len(self.kept)
        records = encode_batch([(None, value, (), self._host.clock.wall_ms())])
        topic = ProduceTopic(KEPT_TOPIC, None, [(0, memoryview(records))])
        body = write_produce_request(PRODUCE_VERSION, ProduceRequest(None, -1, 5000, [topic]))
        answer = read_produce_response(PRODUCE_VERSION, self.call(ApiKey.PRODUCE, PRODUCE_VERSION, body))
        written = answer.topics[0][2][0]
        if written.error_code or written.base_offset != len(self.kept):
            raise BrokenPromise(f"a healthy client's record {len(self.kept)} got {written}")
        self.kept.append(value)

    def check_kept(self, first: int = 0) -> None:
        """Check that every record from `first` on is at the offset at which it was acknowledged."""
        found = [
            (record.offset, record.value)
            for start, data in self._batches(KEPT_TOPIC, first)
            for record in decode_batch(data, start)
            if record.offset >= first
        ]
        if found != list(enumerate(self.kept[first:], first)):
            raise BrokenPromise(f"of {len(self.kept)} acknowledged records {len(found)} are there from {first} on")

    def check_fuzzed(self) -> None:
        """Check that every batch that the node accepted from the inputs is served whole and with a correct CRC."""
        start = self.broker.partition(FUZZED_TOPIC, 0)
        if start is not None:
            self._batches(FUZZED_TOPIC, start.log_start_offset)

    def _batches(self, topic: str, offset: int) -> list[tuple[int, memoryview]]:
        """Return each batch from `offset` on as its position in a block, and the block. Its CRC was checked."""
        batches: list[tuple[int, memoryview]] = []
        while True:
            wanted = FetchTopic(topic, None, [FetchPartition(0, -1, offset, -1, -1, FETCH_BYTES)])
            body = write_fetch_request(FETCH_VERSION, FetchRequest(max_wait_ms=0, min_bytes=0, topics=[wanted]))
            answer = read_fetch_response(FETCH_VERSION, self.call(ApiKey.FETCH, FETCH_VERSION, body))
            got = answer.topics[0][2][0]
            if answer.error_code or got.error_code:
                raise BrokenPromise(f"{topic} cannot be read at {offset}: {answer.error_code} {got.error_code}")
            data = memoryview(got.records)
            if not len(data):
                return batches
            for start, header in check_batches(data, len(data), from_producer=False):
                batches.append((start, data))
                offset = header.next_offset

    def _create(self, topic: str) -> None:
        wanted = {"name": topic, "num_partitions": 1, "replication_factor": 1}
        body = messages.write_request(ApiKey.CREATE_TOPICS, 7, {"topics": [wanted], "timeout": 10_000})
        answer = messages.read_response(ApiKey.CREATE_TOPICS, 7, bytes(self.call(ApiKey.CREATE_TOPICS, 7, body)))
        if answer.topics[0].error_code is not ErrorCode.none:
            raise BrokenPromise(f"topic {topic} cannot be created: {answer.topics[0]}")
