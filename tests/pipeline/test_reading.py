"""Ranges planned and read from a real node, without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import topics
from tests.support.node import Node
from tests.support.ports import free_ports
from tests.support.topics import NOW_MS, numbered

from chronik.client.producer import TransactionalProducer
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.topic_landing import LandSettings
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.decoder import ArrowDecoder
from chronik.pipeline.source.options import SourceOptions
from chronik.pipeline.source.planner import Planner, Position
from chronik.pipeline.source.ranges import RecordRange
from chronik.pipeline.source.reading import ReadSettings, read_range
from chronik.pipeline.source.spark_source import GroupCommitter, StreamReader
from chronik.wire.batch import encode_batch
from chronik.wire.compression import ZSTD


class Source:
    """One source's planner and reader, as Spark would call them."""

    def __init__(self, bootstrap: str, streaming: bool = False, **given: str) -> None:
        self.options = SourceOptions.parse({"kafka.bootstrap.servers": bootstrap, **given}, streaming=streaming)
        self.cluster = BlockingCluster(self.options.bootstrap)
        self.warnings: list[str] = []
        self.planner = Planner(self.options, self.cluster, self.warnings.append)

    def read(self, start: Position, end: Position) -> list[tuple[str, int, int]]:
        return self._rows(self.planner.ranges(start, end))

    def _rows(self, parts: list[tuple[RecordRange, str]]) -> list[tuple[str, int, int]]:
        settings = ReadSettings(self.options.bootstrap, fail_on_data_loss=self.options.fail_on_data_loss)
        return [
            (row["topic"], row["partition"], row["offset"])
            for part in parts
            for batch in read_range(*part, settings)
            for row in batch.to_pylist()
        ]

    def all(self) -> list[tuple[str, int, int]]:
        return self._rows(self.planner.batch_ranges())

    def step(self, start: Position, rows_max: int | None = None) -> Position:
        return self.planner.advance(start, self.planner.latest(), rows_max)


@pytest.fixture
def sources() -> Iterator[list[Source]]:
    made: list[Source] = []
    yield made
    for source in made:
        source.cluster.close()


@pytest.fixture
def source(sources: list[Source], shared_node: Node) -> Any:
    def make(streaming: bool = False, **given: str) -> Source:
        sources.append(Source(shared_node.bootstrap, streaming, **given))
        return sources[-1]

    return make


def offsets(topic: str, partition: int, first: int, stop: int) -> list[tuple[str, int, int]]:
    return [(topic, partition, offset) for offset in range(first, stop)]


def test_the_source_reads_a_whole_topic_in_order_across_many_fetches(shared_node: Node, source: Any) -> None:
    at, name = shared_node.bootstrap, "reading-whole"
    topics.create(at, name, 2)
    big = [(b"k", b"x" * 300_000, (), NOW_MS)] * 2
    topics.append(at, name, 0, *[big] * 12, numbered(100))
    topics.append(at, name, 1, numbered(50), codec=ZSTD)
    assert source(subscribe=name).all() == offsets(name, 0, 0, 124) + offsets(name, 1, 0, 50)
    assert source(subscribe=name, minPartitions="9").all() == offsets(name, 0, 0, 124) + offsets(name, 1, 0, 50)


def test_a_read_starts_and_ends_at_offsets_or_timestamps(shared_node: Node, source: Any) -> None:
    at, name = shared_node.bootstrap, "reading-edges"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(10), numbered(10, 10))
    from_offsets = source(
        subscribe=name, startingOffsets=f'{{"{name}": {{"0": 3}}}}', endingOffsets=f'{{"{name}": {{"0": 17}}}}'
    )
    assert from_offsets.all() == offsets(name, 0, 3, 17)
    times = source(subscribe=name, startingTimestamp=str(NOW_MS + 5), endingTimestamp=str(NOW_MS + 12))
    assert times.all() == offsets(name, 0, 5, 12)
    assert source(subscribe=name, endingTimestamp=str(NOW_MS + 10**6)).all() == offsets(name, 0, 0, 20)
    with pytest.raises(PipelineError, match="no record at or after"):
        source(subscribe=name, startingTimestamp=str(NOW_MS + 10**6)).all()
    with pytest.raises(PipelineError, match="names reading-edges-7, which is not read"):
        source(subscribe=name, startingOffsets=f'{{"{name}": {{"0": 3, "7": 1}}}}').all()


def test_a_batch_read_that_starts_after_its_end_returns_nothing(shared_node: Node, source: Any) -> None:
    at, name = shared_node.bootstrap, "reading-crossed"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(50))

    def at_offset(offset: int) -> str:
        return f'{{"{name}": {{"0": {offset}}}}}'

    assert source(subscribe=name, startingOffsets=at_offset(40), endingOffsets=at_offset(5)).all() == []
    assert source(subscribe=name, startingOffsets=at_offset(4000)).all() == []
    beyond = {"subscribe": name, "startingOffsets": at_offset(45), "endingOffsets": at_offset(60)}
    with pytest.raises(PipelineError, match="reading-crossed-0 ends at offset 50, and 60 was requested"):
        source(**beyond).all()
    lenient = source(**beyond, failOnDataLoss="false")
    assert lenient.all() == offsets(name, 0, 45, 50)
    assert "it is read up to its end" in lenient.warnings[0]


def test_a_micro_batch_waits_for_enough_offsets(shared_node: Node) -> None:
    at, name = shared_node.bootstrap, "reading-min"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(3))
    given = {"kafka.bootstrap.servers": at, "subscribe": name, "startingOffsets": "earliest"}
    for delay, expected in (("1h", 3), ("0s", 4)):
        options = SourceOptions.parse({**given, "minOffsetsPerTrigger": "2", "maxTriggerDelay": delay}, streaming=True)
        reader = StreamReader(options)
        first = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
        assert Position.from_json(first).offsets == {(name, 0): 3 if delay == "1h" else 4}
        if delay == "1h":
            topics.append(at, name, 0, numbered(1))
            first = reader.latestOffset(first, reader.getDefaultReadLimit())
        assert Position.from_json(first).offsets == {(name, 0): expected}
        reader.stop()


def test_a_corrupt_batch_is_an_error_that_names_partition_and_offsets(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, name = shared_node.bootstrap, "reading-corrupt"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(3))
    monkeypatch.setattr(ArrowDecoder, "feed", lambda *_: 1 / 0)
    with pytest.raises(PipelineError, match=r"reading reading-corrupt-0, offsets 0 to 2, from .* failed: ZeroDivision"):
        list(read_range(RecordRange(name, 0, 0, 3), "", ReadSettings(at)))


def test_a_pattern_selects_topics_and_an_assignment_selects_partitions(shared_node: Node, source: Any) -> None:
    at = shared_node.bootstrap
    for name in ("reading-match-a", "reading-match-b", "reading-match-b-not"):
        topics.create(at, name, 2)
        topics.append(at, name, 1, numbered(2))
    assert {row[0] for row in source(subscribePattern="reading-match-.").all()} == {
        "reading-match-a",
        "reading-match-b",
    }
    assert source(assign='{"reading-match-a": [0]}').all() == []
    with pytest.raises(PipelineError, match=r"no topic at .* matches"):
        source(subscribePattern="nothing-like-it").all()
    with pytest.raises(PipelineError, match="has no partition 7"):
        source(assign='{"reading-match-a": [7]}').all()


def test_micro_batches_are_limited_and_reach_the_end(shared_node: Node, source: Any) -> None:
    at, name = shared_node.bootstrap, "reading-limited"
    topics.create(at, name, 2)
    topics.append(at, name, 0, numbered(70))
    topics.append(at, name, 1, numbered(30))
    stream = source(streaming=True, subscribe=name, startingOffsets="earliest")
    position, read, rounds = stream.planner.start(), [], 0
    while (following := stream.step(position, 40)) != position:
        part = stream.read(position, following)
        assert len(part) <= 40
        read += part
        position, rounds = following, rounds + 1
    assert sorted(read) == offsets(name, 0, 0, 70) + offsets(name, 1, 0, 30)
    assert rounds == 3


def test_an_added_partition_is_read_from_its_first_record(shared_node: Node, source: Any) -> None:
    at, name = shared_node.bootstrap, "reading-grown"
    topics.create(at, name, 1)
    stream = source(streaming=True, subscribe=name)
    position = stream.planner.start()
    topics.grow(at, name, 2)
    topics.append(at, name, 1, numbered(5))
    following = stream.step(position)
    assert stream.read(position, following) == offsets(name, 1, 0, 5)


def test_a_position_inside_an_open_transaction_waits_for_its_end(shared_node: Node, source: Any) -> None:
    """A query continues with read_committed where it read uncommitted records before."""
    name, committed = "reading-open", {"kafka.isolation.level": "read_committed"}
    topics.create(shared_node.bootstrap, name, 1)
    before = source(streaming=True, subscribe=name, startingOffsets="earliest")
    transaction = TransactionalProducer(before.cluster.cluster, name)
    before.cluster.run(transaction.begin())
    before.cluster.run(transaction.append({(name, 0): [encode_batch(numbered(3))]}))
    position = before.planner.latest()
    assert position.offsets == {(name, 0): 3}
    after = source(streaming=True, subscribe=name, **committed)
    assert after.planner.latest().offsets == {(name, 0): 0}
    assert after.step(position) == position
    before.cluster.run(transaction.commit())
    before.cluster.run(transaction.begin())
    assert after.step(position).offsets == {(name, 0): 4}
    assert after.warnings == []


def test_records_deleted_by_retention_are_an_error_or_a_gap(shared_node: Node, source: Any) -> None:
    at, name = shared_node.bootstrap, "reading-trimmed"
    topics.create(at, name, 1)
    topics.append(at, name, 0, *[numbered(10)] * 3)
    strict, lenient = (
        source(streaming=True, subscribe=name, startingOffsets="earliest", failOnDataLoss=flag)
        for flag in ("true", "false")
    )
    start = strict.planner.start()
    end = strict.step(start)
    topics.trim(at, name, 0, 13)
    with pytest.raises(PipelineError, match="reading-trimmed-0: offsets 0 to 12 are no longer in the log; pass fail"):
        strict.read(start, end)
    assert lenient.read(start, end) == offsets(name, 0, 13, 30)


def test_a_landing_advises_only_what_it_takes(shared_node: Node, source: Any) -> None:
    """It has no option failOnDataLoss. A new checkpoint continues where the log starts now."""
    at, name = shared_node.bootstrap, "reading-advice"
    topics.create(at, name, 1)
    topics.append(at, name, 0, *[numbered(10)] * 3)
    reading = LandSettings(at, "tables", "checkpoints", "token", wall_ms=lambda: 0).reading
    stream = source(streaming=True, subscribe=name, startingOffsets="earliest", rangesOnly="true")
    [(requested, topic_id)] = stream.planner.ranges(start := stream.planner.start(), stream.step(start))
    topics.trim(at, name, 0, 13)
    assert reading is not None
    with pytest.raises(
        PipelineError, match="offsets 0 to 12 are no longer in the log; choose a new --checkpoint"
    ) as gone:
        list(read_range(requested, topic_id, reading))
    with pytest.raises(PipelineError, match="start with a new checkpoint folder") as shorter:
        stream.step(Position({(name, 0): 99}))
    assert not any("failOnDataLoss" in str(raised.value) for raised in (gone, shorter))


def test_the_source_detects_a_recreated_topic(shared_node: Node, source: Any) -> None:
    at, name = shared_node.bootstrap, "reading-again"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(10))
    strict, lenient = (
        source(streaming=True, subscribe=name, startingOffsets="earliest", failOnDataLoss=flag)
        for flag in ("true", "false")
    )
    first = strict.planner.start()
    position = strict.step(first)
    [(wanted, topic_id)] = strict.planner.ranges(first, position)
    topics.delete(at, name)
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(20))
    with pytest.raises(PipelineError, match="was deleted and recreated since"):
        strict.step(position)
    with pytest.raises(PipelineError, match="was deleted and recreated while it was read"):
        list(read_range(wanted, topic_id, ReadSettings(at)))
    following = lenient.step(position)
    assert lenient.read(position, following) == offsets(name, 0, 0, 20)
    assert "recreated" in lenient.warnings[0]


def test_the_error_names_a_deleted_topic(shared_node: Node, source: Any) -> None:
    at, name = shared_node.bootstrap, "reading-gone"
    topics.create(at, name, 1)
    stream = source(streaming=True, subscribe=name)
    stream.planner.start()
    topics.delete(at, name)
    with pytest.raises(PipelineError, match="topic reading-gone does not exist at"):
        stream.planner.latest()


def test_a_subscription_that_differs_from_the_checkpoint_is_rejected(shared_node: Node, source: Any) -> None:
    at = shared_node.bootstrap
    for name in ("reading-before", "reading-after"):
        topics.create(at, name, 1)
    position = source(streaming=True, subscribe="reading-before").planner.start()
    with pytest.raises(PipelineError, match="reading-before-0 is in the checkpoint but not"):
        source(streaming=True, subscribe="reading-after").step(position)


def test_unreachable_brokers_and_invalid_addresses_are_pipeline_errors() -> None:
    (port,) = free_ports(1)
    with BlockingCluster(f"127.0.0.1:{port}") as cluster, pytest.raises(PipelineError) as raised:
        cluster.topics(["t"])
    assert f"no answer from 127.0.0.1:{port}" in str(raised.value)
    with pytest.raises(PipelineError, match="is not HOST:PORT"):
        BlockingCluster("127.0.0.1")


def test_a_reader_that_stops_early_leaves_no_task_or_socket_open(shared_node: Node) -> None:
    at, name = shared_node.bootstrap, "reading-abandoned"
    topics.create(at, name, 1)
    topics.append(at, name, 0, *[[(b"k", b"x" * 300_000, (), NOW_MS)] * 3] * 10)
    rows = read_range(RecordRange(name, 0, 0, 30), "", ReadSettings(at))
    assert next(rows).num_rows > 0
    rows.close()  # type: ignore[attr-defined]  # a pending task or open socket would cause a warning, and so an error


def test_the_query_listener_commits_positions_that_name_a_group(shared_node: Node) -> None:
    at, name, group = shared_node.bootstrap, "read-listener", "read-listener-group"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(5))
    position = Position({(name, 0): 3})
    ends = [None, "5", json.dumps(position.to_json()), json.dumps(position.to_json(at, group))]
    time = "2026-01-31T12:00:00.000Z"
    progress = SimpleNamespace(id="query", timestamp=time, sources=[SimpleNamespace(endOffset=end) for end in ends])
    GroupCommitter().onQueryProgress(SimpleNamespace(progress=progress))
    assert topics.committed(at, group) == {(name, 0): 3}
