"""The state of running pipelines, as records of the compacted topic `__chronik_pipelines`.

Each `chronik pipeline run` writes its state there every few seconds: the key is the pipeline's name, the value is JSON.
The newest record of a key is the pipeline's state, and a pipeline is `lost` if its record is old and does not say that
it has stopped. Any Kafka cluster can hold the topic.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

import msgspec

from chronik.client.batches import Batches
from chronik.client.cluster import Cluster
from chronik.client.topics import EARLIEST, LATEST, Topics
from chronik.wire.batch import BatchHeader, decode_batch, encode_batch, read_batch_header
from chronik.wire.compression import GZIP
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest

PIPELINES_TOPIC = "__chronik_pipelines"
PARTITION = 0
CONFIGS = {
    "cleanup.policy": "compact,delete",
    "retention.ms": str(7 * 24 * 3600 * 1000),
    "segment.ms": str(3600 * 1000),
    "segment.bytes": str(8 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.2",
}
"""A pipeline that has not run for a week is forgotten."""
HEARTBEAT_S = 10.0
LOST_AFTER_S = 30.0
PIPELINES_MAX = 1_000
STATE_BYTES_MAX = 512 * 1024
DECOMPRESSED_BYTES_MAX = 16 * 1024 * 1024
READ_BYTES_MAX = 64 * 1024 * 1024
"""What one read of the whole topic takes at most. A topic that others have filled must not keep a reader busy."""

ServiceState = Literal["running", "stopped", "lost"]
JobState = Literal["starting", "running", "waiting", "failed", "stopped"]
JobKind = Literal["landing", "sink"]


class AuditState(msgspec.Struct, frozen=True):
    """The newest audit of a landed topic. `verified`: all offsets of the partitions below these are accounted for."""

    verdict: Literal["complete", "incomplete", "failed", "pending"] = "pending"
    checked_ms: int | None = None
    verified: dict[str, int] = {}
    unverified: int = 0
    """Landed offsets that no complete audit has covered yet."""
    gaps: int = 0
    duplicates: int = 0
    mismatches: int = 0
    unexpected: int = 0
    deleted: int = 0
    reason: str = ""


class PipelineJob(msgspec.Struct, frozen=True):
    """One landed topic, or one sink. `reason` is why it is not running, or empty."""

    name: str
    kind: JobKind
    source: str
    target: str
    state: JobState
    since_ms: int
    reason: str = ""
    rows: int = 0
    bytes: int = 0
    dead_letters: int = 0
    lag: int | None = None
    rows_per_s: float | None = None
    batch_s: float | None = None
    last_commit_ms: int | None = None
    restarts: int = 0
    audit: AuditState | None = None


class PipelineState(msgspec.Struct, frozen=True):
    """One service. Counts are since its start. `incarnation` tells two services with one name apart."""

    name: str
    incarnation: str
    host: str
    pid: int
    version: str
    state: ServiceState
    started_ms: int
    heartbeat_ms: int
    jobs: Annotated[list[PipelineJob], msgspec.Meta(max_length=1_000)] = []

    def seen_at(self, now_ms: int) -> PipelineState:
        """Return the state as a reader should see it: `lost` if there was no heartbeat for too long."""
        is_lost = self.state == "running" and now_ms - self.heartbeat_ms > LOST_AFTER_S * 1000
        return msgspec.structs.replace(self, state="lost") if is_lost else self


_decode = msgspec.json.Decoder(PipelineState).decode


def encode_state(state: PipelineState) -> bytes:
    """Return the batch of one heartbeat."""
    return encode_batch([(state.name.encode(), msgspec.json.encode(state), [], state.heartbeat_ms)], codec=GZIP)


class PipelineStates:
    """The newest state of each pipeline: feed it with the topic's batches, in order."""

    def __init__(self) -> None:
        self.next_offset = 0
        self._states: dict[str, PipelineState] = {}

    def feed(self, batches: memoryview) -> bool:
        """Take whole batches from `next_offset` on. Return whether there was any. Records of others are skipped."""
        position, has_any = 0, False
        while (header := _header(batches, position)) is not None:
            if header.next_offset > self.next_offset:
                has_any = True
                if not header.is_control:
                    with suppress(KafkaError, MalformedRequest):
                        for record in decode_batch(batches, position, DECOMPRESSED_BYTES_MAX):
                            if record.offset >= self.next_offset:
                                self._take(record.key, record.value)
                self.next_offset = header.next_offset
            position += header.size_bytes
        return has_any

    def _take(self, key: bytes | None, value: bytes | None) -> None:
        name = (key or b"").decode(errors="replace")
        if value is None:
            self._states.pop(name, None)
            return
        if len(value) > STATE_BYTES_MAX:
            return
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            state = _decode(value)
            if state.name == name and (name in self._states or len(self._states) < PIPELINES_MAX):
                self._states[name] = state

    def at(self, now_ms: int) -> list[PipelineState]:
        return sorted((state.seen_at(now_ms) for state in self._states.values()), key=lambda state: state.name)


def _header(batches: memoryview, position: int) -> BatchHeader | None:
    """Return the header of the batch there, or None if it is not whole."""
    try:
        header = read_batch_header(batches, position)
    except (KafkaError, MalformedRequest):
        return None
    return header if position + header.size_bytes <= len(batches) else None


async def read_states(cluster: Cluster, now_ms: int) -> list[PipelineState]:
    """Return the state of all pipelines of a cluster; none if the topic does not exist. Raises KafkaError."""
    layout = await cluster.layout([PIPELINES_TOPIC])
    topic = layout.topics.get(PIPELINES_TOPIC)
    if topic is None or not topic.partitions:
        if topic is not None and topic.error not in (ErrorCode.none, ErrorCode.unknown_topic_or_partition):
            raise KafkaError(topic.error, f"topic {PIPELINES_TOPIC}")
        return []
    topics, states = Topics(cluster), PipelineStates()
    bounds = [(await topics.offsets(PIPELINES_TOPIC, time, [PARTITION]))[PARTITION] for time in (EARLIEST, LATEST)]
    states.next_offset, end = bounds[0].offset, bounds[1].offset
    size_bytes = 0
    while states.next_offset < end and size_bytes < READ_BYTES_MAX:
        fetched = await Batches(cluster).fetch(PIPELINES_TOPIC, PARTITION, states.next_offset)
        size_bytes += len(fetched.records)
        if not states.feed(memoryview(fetched.records)):
            break
    return states.at(now_ms)


async def create_topic(cluster: Cluster) -> None:
    """Create the topic if it does not exist. Raises KafkaError or ClientError."""
    layout = await cluster.layout([PIPELINES_TOPIC])
    topic = layout.topics.get(PIPELINES_TOPIC)
    if topic is not None and topic.partitions:
        return
    try:
        await Topics(cluster).create(PIPELINES_TOPIC, 1, None, CONFIGS)
    except KafkaError as error:
        if error.code is not ErrorCode.topic_already_exists:
            raise


async def write_state(cluster: Cluster, state: PipelineState) -> None:
    """Append one heartbeat. Raises KafkaError or ClientError; a repeated heartbeat does no harm."""
    await Batches(cluster).append(PIPELINES_TOPIC, PARTITION, encode_state(state))
