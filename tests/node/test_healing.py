"""A replica that found damage recovers from another replica: in-process nodes and a fake controller."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from tests.node.support_replicas import TOPIC, Cluster, Node, on_cluster
from tests.node.test_replication_following import is_caught_up
from tests.support.eventually import until

from chronik.node.replicas import healing as healing_module
from chronik.node.replicas import scrubber as scrubber_module
from chronik.node.replicas.healing import Damage
from chronik.node.replicas.housekeeping import Housekeeping
from chronik.node.replicas.scrubber import Scrubber
from chronik.storage import log as log_module
from chronik.storage.compaction import CompactionJob, SwapUnfinished
from chronik.storage.disk import StorageError
from chronik.storage.log import Log
from chronik.wire.batch import HEADER_BYTES, encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode

SMALL_SEGMENTS = {"segment.bytes": "2000", "min.insync.replicas": "2"}
RECORDS = 60


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing_module, "RETRY_S", 0.05)


async def filled(cluster: Cluster, count: int = RECORDS) -> None:
    """Write records to several segments on every node, with all replicas in sync."""
    leader = cluster[cluster.state.leader]
    for number in range(count):
        await leader.produce(b"%d" % number + b"x" * 100)
    await until(lambda: is_caught_up(cluster))
    assert all(len(node.partition.log.closed_segments()) > 3 for node in cluster.nodes.values())


def segment(cluster: Cluster, node: Node, number: int = 1) -> Path:
    """Return the file of a closed segment."""
    return sorted((cluster.path / f"node-{node.id}" / "logs" / f"{TOPIC}-0").glob("*.log"))[number]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 5] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: read_batch_header(data).size_bytes])


def remove(path: Path) -> None:
    path.unlink()


def break_the_chain(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[9] ^= 0x7F
    path.write_bytes(data)


def set_aside(cluster: Cluster, node: Node) -> list[Path]:
    return sorted((cluster.path / f"node-{node.id}" / "set-aside").glob("*/*.log"))


def damages(node: Node) -> list[Damage]:
    return list(node.healing.damages)


def scrubber(node: Node, interval_ms: int = 100, loop: Any = None) -> Scrubber:
    config = msgspec.structs.replace(node.config, scrub_interval_ms=interval_ms)
    return Scrubber(replace(node.runtime, config=config, loop=loop or node.loop), node.host, node.healing)


def contents(node: Node) -> bytes:
    """Return all batches of the node's log."""
    log = node.partition.log
    parts, offset = [], log.log_start_offset
    while offset < log.log_end_offset:
        job = log.read_job(offset, 1 << 20, log.log_end_offset)
        parts.append(bytes(job()))
        assert job.result is not None and job.damaged_at is None
        offset = job.result.next_offset
    return b"".join(parts)


def housekeeping(node: Node, wall_ms: Callable[[], int] = lambda: 1) -> Housekeeping:
    return Housekeeping(node.runtime, node.host, wall_ms)


async def is_whole_again(cluster: Cluster, node: Node, how: str) -> None:
    """Wait until the node is healed and in sync, and all replicas are identical and complete."""
    await until(lambda: [(damage.how, damage.state) for damage in damages(node)] == [(how, "healed")], "healed")
    assert sorted(cluster.state.isr) == [1, 2, 3]
    await until(lambda: is_caught_up(cluster))
    copies = {contents(each) for each in cluster.nodes.values()}
    assert len(copies) == 1 and copies.pop().count(b"x" * 100) == cluster[1].partition.log_end_offset
    assert not node.partition.is_damaged and not node.partition.log.read_only
    assert node.metrics.damages_found[how] == node.metrics.replicas_healed == 1
    assert node.metrics.replicas_healing == 0


@pytest.mark.parametrize("damage", [flip, cut, remove])
@pytest.mark.parametrize("victim", [1, 2])
@on_cluster(configs=SMALL_SEGMENTS)
async def test_the_scrubber_finds_damage_and_the_replica_is_healed(
    cluster: Cluster, victim: int, damage: Callable[[Path], None]
) -> None:
    await filled(cluster)
    node = cluster[victim]
    path = segment(cluster, node)
    damage(path)
    scrub = scrubber(node)
    scrub.start()
    await is_whole_again(cluster, node, "scrub")
    await scrub.stop()
    assert (cluster.state.leader != 1) == (victim == 1)
    assert [by for by, _ in cluster.losses] == [victim]
    # The damaged segment and all later ones were moved, not deleted.
    moved = set_aside(cluster, node)
    assert (path.name in [each.name for each in moved]) == (damage is not remove)
    assert all(each.name >= path.name for each in moved) and len(moved) > 1
    assert damages(node)[0].set_aside == (str(moved[0].parent),)
    # The replica takes part as before.
    await cluster[cluster.state.leader].produce(b"x" * 100)
    await until(lambda: is_caught_up(cluster))


@on_cluster(configs=SMALL_SEGMENTS)
async def test_a_wrong_index_is_rebuilt_while_the_replica_stays_in_sync(cluster: Cluster) -> None:
    await filled(cluster)
    node = cluster[2]
    index = segment(cluster, node).with_suffix(".timeindex")
    before = index.read_bytes()
    index.write_bytes(b"\7" + before[1:])
    scrub = scrubber(node)
    scrub.start()
    await until(lambda: damages(node) and damages(node)[0].state == "healed")
    await scrub.stop()
    assert index.read_bytes() == before
    assert cluster.losses == [] and cluster.state.isr == (1, 2, 3)
    assert node.metrics.damages_found["scrub"] == 1 and node.metrics.replicas_healed == 0


def transactional(sequence: int, value: bytes, producer_id: int = 7) -> bytes:
    return encode_batch(
        [(b"k", value, (), 1)],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        is_transactional=True,
    )


async def with_damaged_index(cluster: Cluster) -> Path:
    """Abort a transaction, and damage the index that has it, in the active segment of the leader."""
    node = cluster[1]
    await node.produce_request(transactional(0, b"aborted"))
    await node.end_transaction(7, 0, is_commit=False)
    await node.produce(b"x" * 100)
    log = node.partition.log
    assert log.write_aborted()
    path = cluster.path / "node-1" / "logs" / f"{TOPIC}-0" / f"{0:020d}.txnindex"
    path.write_bytes(b"\7" + path.read_bytes()[1:])
    return path


@pytest.mark.parametrize("is_missing", [True, False])
@on_cluster(configs=SMALL_SEGMENTS)
async def test_a_damaged_index_that_a_reader_finds_is_rebuilt_at_once(cluster: Cluster, is_missing: bool) -> None:
    node = cluster[1]
    path = await with_damaged_index(cluster)
    if is_missing:
        path.unlink()
    scrub = scrubber(node, interval_ms=0)
    scrub.start()
    first = await node.consume(0, isolation_level=1)
    assert first.error_code == ErrorCode.kafka_storage_error and not len(first.records)
    await until(lambda: damages(node))
    response = await node.consume(0, isolation_level=1)
    assert response.error_code == 0 and b"aborted" in bytes(response.records)
    assert response.aborted_transactions == [(7, 0)]
    assert [(damage.how, damage.state) for damage in damages(node)] == [("scrub", "healed")]
    await scrub.stop()
    assert cluster.state.leader == 1 and cluster.losses == []


@on_cluster(configs={**SMALL_SEGMENTS, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
async def test_compaction_has_a_damaged_index_rebuilt(cluster: Cluster) -> None:
    node = cluster[1]
    await with_damaged_index(cluster)
    node.partition.log.roll(1)
    await until(lambda: is_caught_up(cluster))
    scrub = scrubber(node, interval_ms=0)
    work = housekeeping(node)
    await work._round("compaction", work._compact)()
    assert b"aborted" in contents(node)
    await until(lambda: damages(node))
    await work._round("compaction", work._compact)()
    assert b"aborted" not in contents(node)
    await scrub.stop()


@on_cluster(configs={**SMALL_SEGMENTS, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
async def test_a_segment_that_is_deleted_during_compaction_is_not_damage(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(cluster)
    node = cluster[1]
    log, run = node.partition.log, CompactionJob.run

    def run_after_deletion(job: CompactionJob) -> None:
        log.increment_log_start(log.closed_segments()[2]).run()
        run(job)

    monkeypatch.setattr(CompactionJob, "run", run_after_deletion)
    work = housekeeping(node)
    await work._round("compaction", work._compact)()
    assert damages(node) == []


@on_cluster(configs=SMALL_SEGMENTS)
async def test_a_leader_that_reads_damage_is_healed(cluster: Cluster) -> None:
    await filled(cluster)
    path = segment(cluster, cluster[1])
    await cluster.stop(1)
    cluster.register(1)
    flip(path)
    cluster.change(leader=1, isr=(1, 2, 3))
    node = await cluster.start(1)
    offset = 0
    response = await node.consume(offset)
    while response.error_code == 0 and len(response.records):
        offset = read_last_offset(bytes(response.records)) + 1
        response = await node.consume(offset)
    assert response.error_code in (ErrorCode.kafka_storage_error, ErrorCode.not_leader_or_follower)
    await is_whole_again(cluster, node, "read")
    assert cluster.state.leader != 1


@on_cluster(configs=SMALL_SEGMENTS)
async def test_a_read_of_a_missing_file_fails_over_and_the_replica_is_healed(cluster: Cluster) -> None:
    await filled(cluster)
    node = cluster[1]
    path = segment(cluster, node)
    path.unlink()
    for closed in node.partition.log._segments.all[:-1]:
        closed.release()
    response = await node.consume(int(path.stem))
    assert response.error_code == ErrorCode.kafka_storage_error
    await is_whole_again(cluster, node, "read")
    response = await cluster[cluster.state.leader].consume(int(path.stem))
    assert response.error_code == 0 and len(response.records)


@pytest.mark.parametrize("damage", [break_the_chain, remove])
@on_cluster(configs={**SMALL_SEGMENTS, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
async def test_a_replica_is_healed_if_compaction_finds_damage(cluster: Cluster, damage: Callable[[Path], None]) -> None:
    await filled(cluster)
    node = cluster[2]
    path = segment(cluster, node)
    damage(path)
    await housekeeping(node)._round("compaction", housekeeping(node)._compact)()
    assert damages(node)[0].offset == int(path.stem)
    await is_whole_again(cluster, node, "read")


@pytest.mark.parametrize("is_stuck", [True, False])
@on_cluster(configs={**SMALL_SEGMENTS, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
async def test_a_leader_hands_over_only_if_its_compaction_is_stuck(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    await filled(cluster)
    node = cluster[cluster.state.leader]
    before = node.partition.log.segment_count

    def refuse(*_: object) -> None:
        raise (SwapUnfinished if is_stuck else OSError)(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(log_module, "replace_segments", refuse)
        advice = "check the disk, then restart the node" if is_stuck else "the next round retries"
        with pytest.raises(StorageError, match=advice):
            await housekeeping(node)._compact(node.partition)
    if is_stuck:
        await until(lambda: cluster.state.leader != node.id)
        return
    assert cluster.state.leader == node.id
    await node.produce(b"more")
    await housekeeping(node)._compact(node.partition)
    assert node.partition.log.segment_count < before


def read_last_offset(records: bytes) -> int:
    at, last = 0, -1
    while at < len(records):
        header = read_batch_header(records, at)
        last, at = header.last_offset, at + header.size_bytes
    return last


@pytest.mark.parametrize("damage", [cut, remove])
@on_cluster(configs=SMALL_SEGMENTS)
async def test_a_log_that_was_damaged_while_its_node_was_down_is_healed(
    cluster: Cluster, damage: Callable[[Path], None]
) -> None:
    await filled(cluster)
    path = segment(cluster, cluster[2])
    await cluster.stop(2)
    cluster.register(2)
    damage(path)
    node = await cluster.start(2)
    await is_whole_again(cluster, node, "recovery")


# -- when no other replica has the data --------------------------------------------------------------------------------


@on_cluster(replicas=(1,), configs={"segment.bytes": "2000"})
async def test_the_only_replica_keeps_its_damaged_files_and_continues_to_lead(cluster: Cluster) -> None:
    node = cluster[1]
    for number in range(RECORDS):
        await node.produce(b"%d" % number + b"x" * 100)
    flip(segment(cluster, node))
    scrub = scrubber(node)
    scrub.start()
    await until(lambda: node.metrics.scrub_passes > 2)
    await scrub.stop()
    await until(lambda: damages(node)[0].waits_for)
    assert damages(node)[0].waits_for == "0 other replicas are in sync, 1 are needed"
    assert cluster.losses == [] and set_aside(cluster, node) == []
    assert (node.metrics.replicas_healing, node.metrics.replicas_healed) == (1, 0)
    assert node.metrics.damages_found["scrub"] == 1, "it is told once"
    await node.produce(b"x")
    assert node.partition.leads


@on_cluster(configs=SMALL_SEGMENTS)
async def test_healing_waits_for_enough_in_sync_replicas_while_another_replica_leads(cluster: Cluster) -> None:
    await filled(cluster)
    cluster.cut(3, 1)
    cluster.cut(3, 2)
    cluster.fence(3)
    cluster.change(isr=(1, 2))
    node = cluster[1]
    flip(segment(cluster, node))
    node.partition.found_damaged(20)
    await until(lambda: cluster.state.leader == 2)
    await until(lambda: damages(node)[0].waits_for == "1 other replicas are in sync, 2 are needed")
    assert cluster.losses == [] and cluster.state.isr == (1, 2)
    await cluster[2].produce(b"x" * 100)
    cluster.heal()
    cluster.register(3)
    await is_whole_again(cluster, node, "read")


@on_cluster(configs={"segment.bytes": "2000"})
async def test_a_replica_whose_damage_report_is_refused_still_follows_and_leads(cluster: Cluster) -> None:
    await filled(cluster)
    cluster.refuses_losses = True
    node = cluster[2]
    node.partition.found_damaged(20)
    await until(lambda: len(cluster.losses) > 1)
    assert set_aside(cluster, node) == []
    await cluster[1].produce(b"x" * 100)
    await until(lambda: is_caught_up(cluster))
    for other in (1, 3):
        cluster.fence(other)
    cluster.change(leader=2, isr=(2,))
    await until(lambda: node.partition.leads)
    # It may be unfit for a moment while it retries; then it leads with the data it has.
    assert damages(node)[0].state == "waiting"


@on_cluster(configs=SMALL_SEGMENTS)
async def test_the_leader_ignores_the_fetch_offset_from_before_the_damage(cluster: Cluster) -> None:
    """On an idle partition, the replica's last fetch before the damage showed the leader a complete log."""
    await filled(cluster)
    node, leader = cluster[2], cluster[1].partition
    log = node.partition.log
    in_sync: list[bool] = []

    def slowly(*arguments: Any) -> list[str]:
        # Make the leader check the ISR, and give it enough time to propose a change.
        node.loop.call_soon_threadsafe(leader._replication.check_isr, leader)
        Event().wait(0.2)
        in_sync.append(2 in cluster.state.isr)
        return Log.set_aside_from(log, *arguments)

    log.set_aside_from = slowly  # type: ignore[method-assign, assignment]
    node.partition.found_damaged(20)
    await is_whole_again(cluster, node, "read")
    assert in_sync == [False]


@on_cluster(configs=SMALL_SEGMENTS)
async def test_a_repeatedly_damaged_replica_waits_for_an_operator(cluster: Cluster) -> None:
    await filled(cluster)
    node = cluster[2]
    for count in range(1, healing_module.HEALS_A_DAY_MAX + 1):
        node.partition.found_damaged(20)
        await until(lambda count=count: node.metrics.replicas_healed == count)  # type: ignore[misc]
    node.partition.found_damaged(20)
    await until(lambda: "replace the disk" in damages(node)[-1].waits_for)
    assert sorted(cluster.state.isr) == [1, 2, 3]


@on_cluster(configs=SMALL_SEGMENTS)
async def test_damage_found_at_a_lower_offset_during_healing_is_healed_too(cluster: Cluster) -> None:
    await filled(cluster)
    node = cluster[2]
    node.partition.found_damaged(40)
    await until(lambda: cluster.losses)
    node.partition.found_damaged(3)
    await until(lambda: all(damage.state == "healed" for damage in damages(node)))
    await until(lambda: is_caught_up(cluster) and sorted(cluster.state.isr) == [1, 2, 3])
    assert min(int(path.stem) for path in set_aside(cluster, node)) == 0
    assert len({contents(each) for each in cluster.nodes.values()}) == 1


@on_cluster(configs=SMALL_SEGMENTS)
async def test_files_set_aside_are_removed_after_their_retention(cluster: Cluster) -> None:
    await filled(cluster)
    node = cluster[2]
    node.partition.found_damaged(20)
    await is_whole_again(cluster, node, "read")
    retention_ms = node.config.set_aside_retention_ms
    await housekeeping(node, lambda: retention_ms)._remove_set_aside()
    assert set_aside(cluster, node)
    await housekeeping(node, lambda: 1 + retention_ms)._remove_set_aside()
    assert list((cluster.path / "node-2" / "set-aside").iterdir()) == []


# -- the scrubber ------------------------------------------------------------------------------------------------------


class SlowDisk:
    """A loop on whose clock each read takes `read_s`, and sleeps advance the clock without waiting."""

    def __init__(self, read_s: float) -> None:
        self.now_s = 0.0
        self.reads: list[tuple[float, float]] = []
        self._read_s = read_s

    def time(self) -> float:
        return self.now_s

    async def run_in_executor(self, executor: Any, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(executor, work)
        self.reads.append((self.now_s, self.now_s + self._read_s))
        self.now_s += self._read_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def one_pass(node: Node, disk: SlowDisk, interval_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    scrub = scrubber(node, int(interval_s * 1000), disk)
    monkeypatch.setattr(scrubber_module, "asyncio", disk)
    await scrub._pass()
    assert node.metrics.scrubbed_bytes == node.partition.log.closed_bytes()
    assert len(disk.reads) == len(node.partition.log.closed_segments())
    assert damages(node) == []


@on_cluster(configs=SMALL_SEGMENTS)
async def test_a_scrub_pass_is_spread_evenly_over_its_interval(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(cluster)
    disk = SlowDisk(read_s=0.001)
    await one_pass(cluster[2], disk, 1000.0, monkeypatch)
    assert disk.now_s == pytest.approx(1000.0)
    gaps_s = [after - before for (before, _), (after, _) in pairwise(disk.reads)]
    assert max(gaps_s) < 1.3 * min(gaps_s)


@on_cluster(configs=SMALL_SEGMENTS)
async def test_the_scrubber_reads_a_slow_disk_5_percent_of_the_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(cluster)
    disk = SlowDisk(read_s=2.0)
    await one_pass(cluster[2], disk, 1.0, monkeypatch)
    for (began_s, ended_s), (next_s, _) in pairwise(disk.reads):
        assert (ended_s - began_s) / (next_s - began_s) == pytest.approx(0.05)


@on_cluster()
async def test_an_interval_of_0_disables_the_scrubber(cluster: Cluster) -> None:
    scrub = scrubber(cluster[1], interval_ms=0)
    scrub.start()
    assert scrub._task is None
    await scrub.stop()
