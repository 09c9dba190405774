"""The states of pipelines in the topic `__chronik_pipelines`."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tests.support import topics
from tests.support.node import Node

from chronik.client.pipelines import (
    LOST_AFTER_S,
    PIPELINES_TOPIC,
    PipelineJob,
    PipelineState,
    PipelineStates,
    create_topic,
    encode_state,
    read_states,
    write_state,
)
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.wire.batch import encode_batch, stamp

NOW_MS = 1_700_000_000_000


def state(name: str, at_ms: int = NOW_MS) -> PipelineState:
    job = PipelineJob("orders", "landing", "orders", "tables/orders", "running", at_ms)
    return PipelineState(name, "i", "host", 7, "v", "running", at_ms, at_ms, [job])


def at_offset(offset: int, batch: bytes) -> bytes:
    stamped = bytearray(batch)
    stamp(stamped, 0, offset, 0)
    return bytes(stamped)


def test_the_newest_record_of_a_name_is_its_state() -> None:
    states = PipelineStates()
    first, other, newer = state("a"), state("b"), state("a", NOW_MS + 5)
    parts = [at_offset(number, encode_state(each)) for number, each in enumerate((first, other, newer))]
    assert states.feed(memoryview(b"".join(parts) + parts[0][:30]))
    assert states.next_offset == 3
    assert states.at(NOW_MS) == [newer, other]
    tombstone = at_offset(3, encode_batch([(b"a", None, [], NOW_MS)]))
    assert states.feed(memoryview(tombstone)) and not states.feed(memoryview(tombstone))
    assert states.at(NOW_MS) == [other]


def test_a_pipeline_without_heartbeats_is_lost_unless_it_stopped() -> None:
    running = state("a")
    late_ms = NOW_MS + int(LOST_AFTER_S * 1000) + 1
    assert running.seen_at(late_ms - 1).state == "running"
    assert running.seen_at(late_ms).state == "lost"
    assert msgspec.structs.replace(running, state="stopped").seen_at(late_ms).state == "stopped"


def test_records_of_others_are_skipped() -> None:
    states = PipelineStates()
    wrong = [(b"a", b"{}"), (b"a", b"\xff"), (b"\xff", b"1"), (None, b"[]"), (b"x", msgspec.json.encode(state("a")))]
    batch = encode_batch([(key, value, [], NOW_MS) for key, value in wrong])
    corrupt = bytearray(at_offset(5, encode_state(state("b"))))
    corrupt[-1] ^= 1
    good = at_offset(6, encode_state(state("c")))
    assert states.feed(memoryview(batch + bytes(corrupt) + good))
    assert [each.name for each in states.at(NOW_MS)] == ["c"]


def test_states_are_written_to_a_compacted_topic_and_read_back(shared_node: Node, tmp_path: Path) -> None:
    with BlockingCluster(shared_node.bootstrap) as cluster:
        assert cluster.run(read_states(cluster.cluster, NOW_MS)) == []
        for _ in range(2):
            cluster.run(create_topic(cluster.cluster))
        for each in (state("a"), state("b"), state("a", NOW_MS + 1)):
            cluster.run(write_state(cluster.cluster, each))
        assert cluster.run(read_states(cluster.cluster, NOW_MS)) == [state("a", NOW_MS + 1), state("b")]
    topics.delete(shared_node.bootstrap, PIPELINES_TOPIC)
