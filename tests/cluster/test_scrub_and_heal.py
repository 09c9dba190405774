"""Files of a running node rot or vanish: it detects that, and the replica heals and is in sync without help.

Meanwhile records flow with acks=all to a leader's and to a follower's damaged replica. Their history passes the
checker, all of them are reread from the start, and afterwards all replicas are identical.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_logs import batches_in, closed_segments, log_of, overwrite, truncate
from tests.cluster.support_offsets import OffsetWatch
from tests.cluster.support_workload import PROGRESS, Workload, all_replicas_agree
from tests.cluster.test_metadata import metric
from tests.support.browser import Expect, OpenPage
from tests.support.eventually import eventually

from chronik.wire.batch import HEADER_BYTES
from chronik.wire.errors import ErrorCode

PARTITIONS = 2
LED, FOLLOWED = range(PARTITIONS)
"""The partition with a damaged leader replica, and the one with a damaged follower replica."""
SCRUB_INTERVAL_MS = 1_000
SEGMENT_BYTES = "8192"
SEGMENTS_TIMEOUT_S = 180.0
HEALED_TIMEOUT_S = 120.0


def flip_a_bit(segment: Path) -> None:
    overwrite(segment, HEADER_BYTES + 3, lambda old: bytes([old[0] ^ 16]))


def delete(segment: Path) -> None:
    segment.unlink()


def cut_at_a_batch_border(segment: Path) -> None:
    *_, (last, _, _) = batches_in(segment)
    truncate(segment, last)


def closed_segment(log: Path) -> Path:
    """Wait for a closed segment with others before and after it and more than one batch, and return it."""

    def find() -> Path | None:
        return next((segment for segment in closed_segments(log)[1:-1] if len(list(batches_in(segment))) > 1), None)

    segment = eventually(find, SEGMENTS_TIMEOUT_S, f"{log.name} has closed segments")
    assert segment is not None
    return segment


def damages(nodes: Nodes, node_id: int, partition: int) -> list[dict[str, Any]]:
    view = nodes.node(node_id).cluster_view()
    assert view is not None, f"node {node_id} does not answer"
    return [damage for damage in view["damages"] if damage["partition"] == partition]


def wait_until_healed(nodes: Nodes, node_id: int, partition: int) -> dict[str, Any]:
    def healed() -> dict[str, Any]:
        found = damages(nodes, node_id, partition)
        assert [damage["state"] for damage in found] == ["healed"], found
        return found[0]

    return eventually(healed, HEALED_TIMEOUT_S, f"node {node_id} has healed its replica of partition {partition}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", [flip_a_bit, delete, pytest.param(cut_at_a_batch_border, marks=pytest.mark.soak)])
def test_damaged_replicas_of_a_leader_and_a_follower_are_healed_under_load(
    damage: Callable[[Path], None], start_nodes: StartNodes, tmp_path: Path
) -> None:
    nodes = start_nodes(scrub_interval_ms=SCRUB_INTERVAL_MS)
    topic = nodes.new_topic(PARTITIONS, segment_bytes=SEGMENT_BYTES)
    leader = nodes.leader(topic, LED)
    follower = next(node_id for node_id in nodes.ids if node_id not in (leader, nodes.leader(topic, FOLLOWED)))
    victims = {LED: leader, FOLLOWED: follower}
    with (
        OffsetWatch(nodes, topic, range(PARTITIONS)),
        Workload(nodes, topic, PARTITIONS, rereads=True) as workload,
    ):
        workload.proceed(PROGRESS)
        segments = {
            partition: closed_segment(log_of(nodes, victim, topic, partition)) for partition, victim in victims.items()
        }
        nodes.wait_in_sync()
        for segment in segments.values():
            damage(segment)
        for partition, victim in victims.items():
            healed = wait_until_healed(nodes, victim, partition)
            assert healed["topic"] == topic
            if partition == FOLLOWED:
                assert (healed["how"], healed["offset"]) == ("scrub", int(segments[partition].stem))
            else:
                # A consumer may read the damaged records before the scrubber does.
                assert healed["how"] in ("scrub", "read")
            (folder,) = healed["set_aside"]
            moved = {path.name for path in Path(folder).glob("*.log")}
            # The damaged segment and all later ones were set aside; only the test deleted anything.
            assert (segments[partition].name in moved) == (damage is not delete)
            # A reader reports where its read began: in the segment before, if it continued in a deleted one.
            is_exact = healed["how"] == "scrub" or damage is not delete
            assert (not is_exact or min(moved) >= segments[partition].name) and len(moved) > 1
            assert metric(nodes.node(victim), "chronik_replicas_healed_total") >= 1
            assert metric(nodes.node(victim), "chronik_damages_found_total") >= 1
        workload.proceed(PROGRESS)
        nodes.wait_in_sync()
        workload.read_again()
        workload.finish(tmp_path / "history.jsonl")
    for node_id in nodes.ids:
        assert metric(nodes.node(node_id), "chronik_replicas_healing") == 0
        assert metric(nodes.node(node_id), "chronik_scrubbed_bytes_total") > 0
    all_replicas_agree(nodes, workload.recorder.acknowledged())
    nodes.no_surprises()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("damage", "how"),
    [
        pytest.param(delete, "recovery", marks=pytest.mark.soak),
        (cut_at_a_batch_border, "recovery"),
        (flip_a_bit, "read"),
    ],
)
def test_without_the_scrubber_recovery_or_a_read_finds_the_damage(
    damage: Callable[[Path], None], how: str, start_nodes: StartNodes, tmp_path: Path
) -> None:
    # A commit log would bring back what is cut from the log of a killed node.
    nodes = start_nodes(scrub_interval_ms=0, commit_log=False)
    topic = nodes.new_topic(1, segment_bytes=SEGMENT_BYTES)
    with OffsetWatch(nodes, topic, [0]), Workload(nodes, topic, 1, rereads=True) as workload:
        workload.proceed(PROGRESS)
        victim = next(node_id for node_id in nodes.ids if node_id != nodes.leader(topic))
        segment = closed_segment(log_of(nodes, victim, topic, 0))
        nodes.kill(victim)
        damage(segment)
        nodes.start(victim)
        if how == "read":
            nodes.wait_in_sync()
            nodes.elect(topic, {0: victim})
            workload.read_again()
        assert wait_until_healed(nodes, victim, 0)["how"] == how
        workload.proceed(PROGRESS)
        nodes.wait_in_sync()
        workload.finish(tmp_path / "history.jsonl")
    all_replicas_agree(nodes, workload.recorder.acknowledged())
    nodes.no_surprises()


@pytest.mark.timeout(400)
def test_the_doctor_and_the_web_page_show_healed_damage(
    start_nodes: StartNodes, open_page: OpenPage, expect: Expect
) -> None:
    nodes = start_nodes(scrub_interval_ms=SCRUB_INTERVAL_MS)
    topic = nodes.new_topic(1, segment_bytes=SEGMENT_BYTES)
    with Workload(nodes, topic, 1) as workload:
        workload.proceed(PROGRESS)
        victim = next(node_id for node_id in nodes.ids if node_id != nodes.leader(topic))
        page = open_page(nodes.node(victim).http)
        expect(page.locator("#health")).to_contain_text("Healthy")
        expect(page.get_by_role("region", name="Damage found")).to_have_count(0)
        flip_a_bit(closed_segment(log_of(nodes, victim, topic, 0)))
        wait_until_healed(nodes, victim, 0)
        nodes.wait_in_sync()
        region = page.get_by_role("region", name=f"Damage found on node {victim}")
        expect(region).to_contain_text(f"{topic}-0")
        expect(region).to_contain_text("healed")
        expect(region).to_contain_text("a batch fails its checksum")
        other = nodes.node(next(node_id for node_id in nodes.ids if node_id != victim))
        with urllib.request.urlopen(f"http://{other.http}/api/doctor/{topic}?seconds=2", timeout=30) as answer:
            diagnosis = json.load(answer)
        evidence = [item for item in diagnosis["evidence"] if "damage" in item["text"]]
        assert [(item["node"], item["partition"]) for item in evidence] == [(victim, 0)]
        assert "by scrub" in evidence[0]["text"] and evidence[0]["text"].endswith("it is healed")


@pytest.mark.timeout(400)
def test_a_single_node_serves_its_damaged_log_without_the_bad_batch(start_nodes: StartNodes) -> None:
    nodes = start_nodes(1, scrub_interval_ms=SCRUB_INTERVAL_MS)
    topic = nodes.new_topic(1, segment_bytes=SEGMENT_BYTES)
    with Workload(nodes, topic, 1) as workload:
        workload.proceed(PROGRESS)
        segment = closed_segment(log_of(nodes, 1, topic, 0))
        flip_a_bit(segment)

        def is_reported() -> bool:
            (damage,) = damages(nodes, 1, 0) or [{"waits_for": ""}]
            return "other replicas are in sync" in damage["waits_for"]

        eventually(is_reported, HEALED_TIMEOUT_S, "the damage is found, and no replica can heal it")
        workload.proceed(PROGRESS)
        assert segment.exists() and not (nodes.data_folder(1) / "set-aside").exists()
    damaged_at = int(segment.stem)
    consumer = Consumer({"bootstrap.servers": nodes.bootstrap, "group.id": "readers", "check.crcs": False})
    with closing(consumer):
        consumer.assign([TopicPartition(topic, 0, 0)])
        read: list[int] = []

        def is_told() -> bool:
            messages = consumer.consume(1_000, timeout=1.0)
            errors = [error.code() for message in messages if (error := message.error()) is not None]
            read.extend(message.offset() or 0 for message in messages if message.error() is None)
            return ErrorCode.corrupt_message in errors

        eventually(is_told, HEALED_TIMEOUT_S, "a reader without checksums is told, and does not get the bad batch")
        assert read == list(range(damaged_at))
