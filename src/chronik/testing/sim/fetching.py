"""One fetch of one partition, plain or checked against the history."""

from __future__ import annotations

from typing import NamedTuple

from chronik.client.connection import Connection
from chronik.testing.sim.history import PartitionHistory
from chronik.wire.api import ApiKey
from chronik.wire.batch import check_batches, decode_batch
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, read_fetch_response, write_fetch_request
from chronik.wire.records import Record

BY_NAME_AT_MOST = 12
FETCH_SLACK_S = 0.6


class Fetched(NamedTuple):
    """The result of one fetch: records from the fetch offset on, decoded from whole batches."""

    records: list[Record]
    next_offset: int
    high_watermark: int
    log_start_offset: int
    damage: str | None
    """Why the records could not be read."""


async def fetch_records(
    connection: Connection, topic: str, partition: int, position: int, *, max_bytes: int, max_wait_ms: int
) -> Fetched:
    """Fetch from `position`. Raises the broker's error as KafkaError, or ClientError."""
    wanted = FetchPartition(
        partition,
        current_leader_epoch=-1,
        fetch_offset=position,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        max_bytes=max_bytes,
    )
    request = FetchRequest(
        max_wait_ms=max_wait_ms, min_bytes=1, max_bytes=max_bytes, topics=[FetchTopic(topic, None, [wanted])]
    )
    version = connection.version(ApiKey.FETCH, BY_NAME_AT_MOST)
    body = await connection.request(
        ApiKey.FETCH, version, write_fetch_request(version, request), timeout_s=max_wait_ms / 1000 + FETCH_SLACK_S
    )
    answer = read_fetch_response(version, body)
    result = answer.topics[0][2][0] if answer.topics else None
    code = answer.error_code or (result.error_code if result is not None else ErrorCode.unknown_server_error)
    if code or result is None:
        raise KafkaError(ErrorCode(code), f"fetch at {position}")
    data = memoryview(result.records)
    records: list[Record] = []
    next_offset = position
    damage: str | None = None
    try:
        for start, header in check_batches(data, len(data), from_producer=False) if len(data) else ():
            records += [record for record in decode_batch(data, start) if record.offset >= position]
            next_offset = header.next_offset
    except KafkaError as error:
        damage = f"{error.code.name} {error.message}"
    return Fetched(records, next_offset, result.high_watermark, result.log_start_offset, damage)


async def fetch(
    connection: Connection, history: PartitionHistory, position: int, reader: str, *, max_bytes: int, max_wait_ms: int
) -> int:
    """Fetch from `position`, check the result, and return the next position. Raises as `fetch_records` does."""
    known_end = history.end_seen
    fetched = await fetch_records(connection, *history.name, position, max_bytes=max_bytes, max_wait_ms=max_wait_ms)
    history.end_shown(fetched.high_watermark, known_end, reader)
    if fetched.damage is not None:
        history.damaged(position, fetched.damage, reader)
        return position
    for record in fetched.records:
        if record.offset != position or record.offset >= fetched.high_watermark:
            history.skipped(position, record.offset, fetched.high_watermark, reader)
            return position
        history.read(record.offset, record.value, reader)
        position += 1
    return position
