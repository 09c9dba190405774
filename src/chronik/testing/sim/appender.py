"""An idempotent producer that sends one batch at a time, for clients that must know what is in the log."""

from __future__ import annotations

from collections.abc import Sequence

from chronik.client.errors import RETRIABLE
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, SimClient
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

BY_NAME_AT_MOST = 12
PRODUCE_TIMEOUT_MS = 700
ACKS_ALL = -1


class Appender:
    """Appends to one partition. Invariant: each acknowledged batch is in the log once, after all earlier batches."""

    def __init__(self, client: SimClient, topic: str, partition: int = 0) -> None:
        self._client = client
        self._topic = topic
        self._partition = partition
        self._producer_id = -1
        self._producer_epoch = -1
        self._next_sequence = 0

    async def append(self, records: Sequence[tuple[bytes | None, bytes | None]]) -> int:
        """Send the batch until it is acknowledged, and return its base offset."""
        client = self._client
        if self._producer_id < 0:
            await client.insist(self._init_producer_id)
        wall_ms = 1_750_000_000_000 + int(client.world.now * 1000)
        data = encode_batch(
            [(key, value, (), wall_ms) for key, value in records],
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            base_sequence=self._next_sequence,
        )
        self._next_sequence += len(records)
        return await client.insist(lambda: self._send(data))

    async def _send(self, data: bytes) -> int:
        connection = await self._client.leader(self._topic, self._partition)
        version = connection.version(ApiKey.PRODUCE, BY_NAME_AT_MOST)
        topics = [ProduceTopic(self._topic, None, [(self._partition, memoryview(data))])]
        request = write_produce_request(version, ProduceRequest(None, ACKS_ALL, PRODUCE_TIMEOUT_MS, topics))
        body = await connection.request(ApiKey.PRODUCE, version, request, timeout_s=REQUEST_TIMEOUT_S)
        result = read_produce_response(version, body).topics[0][2][0]
        code = ErrorCode(result.error_code)
        if code is not ErrorCode.none:
            if code not in RETRIABLE:
                self._client.world.violated(f"{self._client.name} got {code.name} ({result.error_message})")
            raise KafkaError(code, result.error_message or "")
        return result.base_offset

    async def _init_producer_id(self) -> None:
        values = {"transactional_id": None, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1}
        connection = await self._client.leader(self._topic, self._partition)
        response = await connection.call(ApiKey.INIT_PRODUCER_ID, values, timeout_s=REQUEST_TIMEOUT_S)
        if response.error_code != ErrorCode.none:
            raise KafkaError(response.error_code, "no producer id")
        self._producer_id, self._producer_epoch = int(response.producer_id), int(response.producer_epoch)
        self._client.history.producer_id_given(self._producer_id, self._producer_epoch, self._client.name)
