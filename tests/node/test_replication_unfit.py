"""A node whose log is damaged or not open does not lead: another in-sync replica does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.node.support_replicas import TOPIC, Cluster, on_cluster
from tests.node.support_transactions import create_topic
from tests.node.test_replication_following import is_caught_up
from tests.support.eventually import until

from chronik.storage.disk import StorageFull
from chronik.storage.folder import Claim, DataFolder
from chronik.wire.batch import encode_batch


@on_cluster()
async def test_a_replica_with_a_damaged_log_neither_leads_nor_truncates_followers(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    two = cluster[2].partition
    two.log.read_only = two.log.read_only_forever = True
    cluster.change(leader=2)
    assert not two.leads and two.leader is None
    await until(lambda: cluster.state.leader in (1, 3))
    await until(lambda: cluster[cluster.state.leader].partition.leads)
    assert cluster.state.isr == (1, 2, 3)
    assert [node.partition.log_end_offset for node in cluster.nodes.values()] == [1, 1, 1]


@on_cluster()
async def test_a_leader_without_disk_space_transfers_leadership(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))

    def full(*_: Any) -> Any:
        raise StorageFull("no room")

    cluster[1].partition.log.append = full  # type: ignore[method-assign, assignment]
    with pytest.raises(StorageFull):
        cluster[1].append(b"second")
    await until(lambda: cluster.state.leader in (2, 3))
    leader = cluster[cluster.state.leader]
    await until(lambda: leader.partition.leads)
    await leader.produce(b"second")


async def test_a_full_disk_is_logged_once_and_so_is_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalNodes(tmp_path, 1, default_replication_factor=1) as nodes:
        (broker,) = await nodes.start_all()
        await create_topic(nodes, TOPIC, 1, 1)
        partition = broker.partition(TOPIC, 0)
        assert partition is not None
        batch = memoryview(encode_batch([(None, b"x", [], 1)]))

        def full(*_: Any) -> Any:
            raise StorageFull("append: no room")

        with monkeypatch.context() as patch:
            patch.setattr(partition.log, "append", full)
            for _ in range(2):
                with pytest.raises(StorageFull):
                    partition.append(batch, 1)
        assert [line["reason"] for line in nodes.events(1, "log_read_only")] == ["append: no room"]
        assert not nodes.events(1, "log_writable")
        for _ in range(2):
            partition.append(batch, 1)
        assert len(nodes.events(1, "log_writable")) == 1


@on_cluster()
async def test_a_leadership_transfer_is_retried_if_the_controller_did_not_answer(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    log = cluster[2].partition.log
    log.read_only = log.read_only_forever = True
    cluster.refuses_proposals = True
    cluster.change(leader=2)
    await until(lambda: [by for by, _, _ in cluster.proposals].count(2) == 1)
    cluster.refuses_proposals = False
    await until(lambda: cluster.state.leader in (1, 3))


@on_cluster()
async def test_a_leader_that_reads_damage_transfers_leadership_to_an_intact_replica(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    assert cluster[1].partition.found_damaged(0), "the reader is to ask again"
    await until(lambda: cluster.state.leader in (2, 3))
    leader = cluster[cluster.state.leader]
    await until(lambda: leader.partition.leads)
    assert bytes((await leader.consume(0)).records)
    by, members, to = next(proposal for proposal in cluster.proposals if proposal[0] == 1)
    assert to == cluster.state.leader
    assert by not in [member for member, _ in members], "nobody has to wait for it"
    # It must not lead again, either.
    cluster.change(leader=1, isr=(1, 2, 3))
    await until(lambda: cluster.state.leader in (2, 3))


@on_cluster(replicas=(1,))
async def test_a_single_leader_with_damage_continues_to_serve(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    assert not cluster[1].partition.found_damaged(0)
    await cluster[1].produce(b"second")


@on_cluster(replicas=(1,))
async def test_the_only_replica_leads_even_if_its_log_is_damaged(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    one = cluster[1].partition
    one.log.read_only = one.log.read_only_forever = True
    cluster.register(1)
    assert one.leads and one.leader_epoch == 1
    assert bytes((await cluster[1].consume(0)).records)


@on_cluster()
async def test_another_replica_leads_while_the_leaders_log_is_not_open(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = DataFolder.claim_log
    is_sick = True

    def sick(folder: DataFolder, topic: str, partition: int, topic_id: UUID, now_ms: int) -> Claim:
        if is_sick and folder.path.endswith("node-2"):
            raise OSError("the disk is sick")
        return claim(folder, topic, partition, topic_id, now_ms)

    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    await cluster.stop(2)
    cluster.register(2)
    monkeypatch.setattr(DataFolder, "claim_log", sick)
    # The image already names node 2 as leader when it starts.
    cluster.change(leader=2)
    two = await cluster.start(2)
    await until(lambda: cluster.state.leader in (1, 3) and 2 not in cluster.state.isr)
    assert not two.has_partition
    is_sick = False
    await two.host.record_recovery_points()
    await until(lambda: (TOPIC, 0) in two.host.partitions)
    await until(lambda: is_caught_up(cluster) and 2 in cluster.state.isr)
    cluster.change(leader=2)
    await until(lambda: two.partition.leads)
