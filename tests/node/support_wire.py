"""A minimal client: one blocking socket that sends exactly what a test gives it and shows exactly what came back.

Real clients hide a broker's behaviour behind retries and defaults. Here every request is one frame, and every response
is read whole (leftover bytes are an error). A connection that the node closed is a value, not an exception.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tests.support.node import Node

from chronik.wire import frames, messages
from chronik.wire.api import ApiKey, response_header_is_flexible
from chronik.wire.batch import decode_batch, encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    read_fetch_response,
    write_fetch_request,
)
from chronik.wire.primitives import skip_tags
from chronik.wire.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    ProduceTopic,
    read_produce_response,
    write_produce_request,
)
from chronik.wire.records import Record

ANSWER_TIMEOUT_S = 15.0
TIMESTAMP_MS = 1_700_000_000_000
PRODUCE_VERSION = 11
FETCH_VERSION = 12
FETCH_BY_ID_VERSION = 16
ACKS_ALL = -1
NO_SESSION = (0, -1)
NEW_SESSION = (0, 0)

_SIZE = struct.Struct(">i")


class ConnectionEnded(Exception):
    """The node closed the connection when a response was expected."""


class WireClient:
    """One connection. Requests are sent as given; `answers` are read in the order in which they arrive."""

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = ANSWER_TIMEOUT_S,
        client_id: str | None = "wire-test",
        source: str = "",
    ) -> None:
        """`source` is the address of this client; the default is the system's choice."""
        self.socket = socket.create_connection((host, port), timeout_s, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client_id = client_id
        self._correlation_id = 0
        self._received = bytearray()
        self._held: list[bytes] | None = None

    def __enter__(self) -> WireClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def send_bytes(self, data: bytes) -> None:
        if self._held is None:
            self.socket.sendall(data)
        else:
            self._held.append(data)

    @contextmanager
    def one_write(self) -> Iterator[None]:
        """Send everything inside the context in one write."""
        self._held = []
        yield
        held, self._held = self._held, None
        self.socket.sendall(b"".join(held))

    def send(self, key: int, version: int, body: bytes) -> int:
        """Send one frame and return the correlation id that its response must carry."""
        frame, correlation_id = self.frame(key, version, body)
        self.send_bytes(frame)
        return correlation_id

    def frame(self, key: int, version: int, body: bytes) -> tuple[bytes, int]:
        self._correlation_id += 1
        return frames.write_request(key, version, self._correlation_id, self._client_id, body), self._correlation_id

    def receive(self) -> tuple[int, bytes]:
        """Return the correlation id of the next frame and the bytes after it."""
        while len(self._received) < 4 or len(self._received) < 4 + _SIZE.unpack_from(self._received)[0]:
            data = self.socket.recv(1 << 20)
            if not data:
                raise ConnectionEnded(f"{len(self._received)} bytes of an unfinished frame were there")
            self._received += data
        (size,) = _SIZE.unpack_from(self._received)
        frame = bytes(self._received[4 : 4 + size])
        del self._received[: 4 + size]
        return int.from_bytes(frame[:4], "big"), frame[4:]

    def answer(self, key: int, version: int, correlation_id: int) -> bytes:
        """Return the body of the next frame, which must be the response to this request."""
        got, rest = self.receive()
        assert got == correlation_id, f"answer to {got} came where {correlation_id} was next"
        at = skip_tags(memoryview(rest), 0) if response_header_is_flexible(key, version) else 0
        return rest[at:]

    def ended_without_a_byte(self) -> bool:
        """Return whether the node closes the connection before it sends anything; wait for either."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    # -- requests ------------------------------------------------------------------------------------------------------

    def call(self, key: ApiKey, version: int, values: Mapping[str, Any]) -> Any:
        """Send one request by field names and return the response as kio's entity."""
        correlation_id = self.send(key, version, messages.write_request(key, version, values))
        return messages.read_response(key, version, self.answer(key, version, correlation_id))

    def send_produce(
        self,
        topic: str,
        records: bytes,
        *,
        partition: int = 0,
        acks: int = ACKS_ALL,
        version: int = PRODUCE_VERSION,
        timeout_ms: int = 10_000,
        transactional_id: str | None = None,
    ) -> int:
        request = ProduceRequest(
            transactional_id, acks, timeout_ms, [ProduceTopic(topic, None, [(partition, memoryview(records))])]
        )
        return self.send(ApiKey.PRODUCE, version, write_produce_request(version, request))

    def produced(self, correlation_id: int, version: int = PRODUCE_VERSION) -> ProducePartitionResponse:
        body = self.answer(ApiKey.PRODUCE, version, correlation_id)
        return read_produce_response(version, memoryview(body)).topics[0][2][0]

    def produce(
        self, topic: str, records: bytes, *, version: int = PRODUCE_VERSION, **more: Any
    ) -> ProducePartitionResponse:
        return self.produced(self.send_produce(topic, records, version=version, **more), version)

    def append(self, topic: str, *values: bytes, partition: int = 0) -> int:
        """Append one batch, which must succeed, and return its base offset."""
        response = self.produce(topic, batch(*values), partition=partition)
        assert response.error_code == 0, (ErrorCode(response.error_code), response.error_message)
        return response.base_offset

    def send_fetch(self, request: FetchRequest, version: int = FETCH_VERSION) -> int:
        return self.send(ApiKey.FETCH, version, write_fetch_request(version, request))

    def fetched(self, correlation_id: int, version: int = FETCH_VERSION) -> FetchResponse:
        return read_fetch_response(version, memoryview(self.answer(ApiKey.FETCH, version, correlation_id)))

    def fetch(self, request: FetchRequest, version: int = FETCH_VERSION) -> FetchResponse:
        return self.fetched(self.send_fetch(request, version), version)

    def fetch_one(self, topic: str, offset: int = 0, *, partition: int = 0, **more: Any) -> FetchPartitionResponse:
        """Fetch one partition from `offset` on."""
        return self.fetch(fetch_of((topic, partition, offset), **more)).topics[0][2][0]

    def records(self, topic: str, *, partition: int = 0) -> list[Record]:
        """Return every record that a consumer of the partition sees, from its start."""
        start = self.offset_at(topic, -2, partition=partition)
        found: list[Record] = []
        while True:
            response = self.fetch_one(topic, start, partition=partition)
            assert response.error_code == 0, ErrorCode(response.error_code)
            if not len(response.records):
                return found
            found += [record for record in decoded(response.records) if record.offset >= start]
            start = found[-1].offset + 1

    def offset_at(self, topic: str, timestamp: int, *, partition: int = 0, version: int = 7) -> int:
        offset: int = self.list_offset(topic, timestamp, partition=partition, version=version).offset
        return offset

    def list_offset(self, topic: str, timestamp: int, *, partition: int = 0, version: int = 7) -> Any:
        wanted = {"partition_index": partition, "current_leader_epoch": -1, "timestamp": timestamp}
        values = {"replica_id": -1, "topics": [{"name": topic, "partitions": [wanted]}]}
        found = self.call(ApiKey.LIST_OFFSETS, version, values).topics[0].partitions[0]
        assert found.error_code is ErrorCode.none, found.error_code
        return found

    def create_topic(self, name: str, *, partitions: int = 1, configs: Mapping[str, str] | None = None) -> Any:
        """Send CreateTopics for one topic and return its entry in the response."""
        wanted = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": 1,
            "configs": [{"name": key, "value": value} for key, value in (configs or {}).items()],
        }
        return self.call(ApiKey.CREATE_TOPICS, 7, {"topics": [wanted], "timeout": 10_000}).topics[0]

    def new_topic(self, *, partitions: int = 1, **configs: str) -> str:
        """Create a topic with a unique name; its configs are named with underscores."""
        name = unique("topic")
        dotted = {key.replace("_", "."): value for key, value in configs.items()}
        created = self.create_topic(name, partitions=partitions, configs=dotted)
        assert created.error_code is ErrorCode.none, (created.error_code, created.error_message)
        return name

    def metadata(self, *names: str, version: int = 12, create: bool = False) -> Any:
        wanted = [{"name": name} for name in names]
        return self.call(ApiKey.METADATA, version, {"topics": wanted, "allow_auto_topic_creation": create})

    def topic_id(self, name: str) -> uuid.UUID:
        found = self.metadata(name).topics[0].topic_id
        assert isinstance(found, uuid.UUID)
        return found

    def init_producer_id(self, producer_id: int = -1, producer_epoch: int = -1) -> tuple[int, int]:
        answer = self.call(
            ApiKey.INIT_PRODUCER_ID,
            4,
            {
                "transactional_id": None,
                "transaction_timeout": 60_000,
                "producer_id": producer_id,
                "producer_epoch": producer_epoch,
            },
        )
        assert answer.error_code is ErrorCode.none
        return answer.producer_id, answer.producer_epoch


def connect(node: Node, **more: Any) -> WireClient:
    return WireClient(node.kafka_port, **more)


def unique(what: str) -> str:
    """Return a unique name, for a node that several tests share."""
    return f"{what}-{uuid.uuid4().hex[:12]}"


def batch(*values: bytes, key: bytes | None = b"k", timestamp_ms: int = TIMESTAMP_MS, **more: Any) -> bytes:
    """Encode one batch with one record per value, a millisecond apart."""
    return encode_batch([(key, value, (), timestamp_ms + index) for index, value in enumerate(values)], **more)


def decoded(records: bytes | bytearray | memoryview) -> list[Record]:
    """Decode the records of all batches in fetched data."""
    data = bytes(records)
    found: list[Record] = []
    at = 0
    while at < len(data):
        found += decode_batch(data, at)
        at += read_batch_header(data, at).size_bytes
    return found


def values_of(response: FetchPartitionResponse) -> list[bytes | None]:
    return [record.value for record in decoded(response.records)]


def fetch_of(
    *partitions: tuple[str | uuid.UUID, int, int],
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 50 * 1024 * 1024,
    partition_max_bytes: int = 1024 * 1024,
    session: tuple[int, int] = NO_SESSION,
    forgotten: Sequence[tuple[str, int]] = (),
) -> FetchRequest:
    """Build a fetch of (topic name or id, partition, offset), each as a separate topic entry."""
    topics = [
        FetchTopic(
            topic if isinstance(topic, str) else None,
            topic if isinstance(topic, uuid.UUID) else None,
            [FetchPartition(index, -1, offset, -1, -1, partition_max_bytes)],
        )
        for topic, index, offset in partitions
    ]
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        session_id=session[0],
        session_epoch=session[1],
        topics=topics,
        forgotten=[(topic, None, [index]) for topic, index in forgotten],
    )


def errors_of(response: Any) -> set[ErrorCode]:
    """Return every error code in the response, at any depth, other than "none"."""
    return {code for code in _codes(response) if code is not ErrorCode.none}


def _codes(value: Any) -> Iterator[ErrorCode]:
    if isinstance(value, ErrorCode):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _codes(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _codes(getattr(value, field.name))
