"""Cluster membership of a node: founding, joining, losing and regaining the majority, leaving."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.node.cluster_harness import LocalNodes
from tests.support.eventually import until

from chronik.metadata.commands import AllocateProducerIds
from chronik.metadata.elections import BrokerStates
from chronik.metadata.registration import plan_registration
from chronik.node.broker import Broker
from chronik.node.config import ConfigError, NodeConfig, Peer
from chronik.node.membership.cluster_member import founders
from chronik.node.membership.metadata_log import NotController
from chronik.node.membership.topic_plans import NewTopic
from chronik.raft.store import StoreError
from chronik.storage.folder import DataFolderError
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

Story = Callable[[LocalNodes], Coroutine[Any, Any, None]]
ALONE: dict[str, Any] = {"default_replication_factor": 1}


def voters(broker: Broker) -> list[int]:
    return [member.node_id for member in broker.member.raft.node.membership.voters]


def learners(broker: Broker) -> list[int]:
    return [member.node_id for member in broker.member.raft.node.membership.members if not member.is_voter]


def stored_cluster_id(nodes: LocalNodes, node_id: int) -> str:
    return str(json.loads((nodes.folder / f"node-{node_id}" / "meta.json").read_text())["cluster_id"])


# -- startup -----------------------------------------------------------------------------------------------------------


async def test_three_nodes_form_one_cluster_and_persist_its_id(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        (cluster_id,) = {broker.image.cluster_id for broker in brokers}
        assert len(cluster_id) == 22
        assert sum(broker.is_controller for broker in brokers) == 1
        assert all(list(broker.image.brokers) == list(brokers[0].image.brokers) for broker in brokers)
        await until(lambda: all(stored_cluster_id(nodes, node_id) == cluster_id for node_id in (1, 2, 3)))
        for broker in brokers:
            await nodes.kill(broker)
        again = await nodes.start_all()
        assert {broker.image.cluster_id for broker in again} == {cluster_id}


async def test_a_single_node_is_its_own_majority(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=1, **ALONE) as nodes:
        (one,) = await nodes.start_all()
        assert one.is_controller
        assert one.member.lease_is_valid()
        await one.metadata.propose(AllocateProducerIds(1, 10))
        await nodes.kill(one)
        (one,) = await nodes.start_all()
        assert one.image.next_producer_id == 10


async def test_a_clean_shutdown_is_proved_by_the_previous_broker_epoch(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 1) as nodes:
        first = await nodes.start(1)
        epoch = first.member.session.broker_epoch
        await nodes.stop(first)
        second = await nodes.start(1)
        told = second.member.session.registration
        assert (told.was_clean, told.previous_epoch) == (True, epoch)
        assert second.member.session.broker_epoch > epoch
        await nodes.kill(second)
        told = (await nodes.start(1)).member.session.registration
        assert (told.was_clean, told.previous_epoch) == (False, None)


async def test_replicated_durability_treats_a_kill_as_clean_until_a_reboot(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 1, durability="replicated") as nodes:
        first = await nodes.start(1)
        epoch = first.member.session.broker_epoch
        await nodes.kill(first)
        second = await nodes.start(1)
        told = second.member.session.registration
        assert (told.was_clean, told.previous_epoch) == (True, epoch)
        await nodes.kill(second)
        nodes.boot_id = "the machine has booted"
        told = (await nodes.start(1)).member.session.registration
        assert (told.was_clean, told.previous_epoch) == (False, None)


async def test_a_configured_cluster_id_is_adopted_and_a_different_one_refused_later(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=1, **ALONE) as nodes:
        one = await nodes.start(1, nodes.config(1, cluster_id="chosen"))
        assert one.image.cluster_id == "chosen"
        await until(lambda: stored_cluster_id(nodes, 1) == "chosen")
        await nodes.stop(one)
        with pytest.raises(DataFolderError, match="belongs to cluster chosen"):
            await nodes.start(1, nodes.config(1, cluster_id="other"))


def test_the_first_three_or_five_nodes_are_voters() -> None:
    def of(own: int, *others: int) -> tuple[int, ...]:
        return founders(NodeConfig(node_id=own, peers=tuple(Peer(other, f"h:{other + 1}") for other in others)))

    assert of(1) == (1,)
    assert of(2, 1) == (1, 2)
    assert of(3, 1, 2) == (1, 2, 3)
    assert of(4, 1, 2, 3) == (1, 2, 3)
    assert of(4, 1, 2, 3, 5) == (1, 2, 3, 4, 5)
    assert of(6, 1, 2, 3, 5, 4) == (1, 2, 3, 4, 5)


async def test_a_single_node_with_logs_but_no_metadata_store_does_not_start(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=1, **ALONE) as nodes:
        (tmp_path / "node-1" / "logs" / "orders-0").mkdir(parents=True)
        (tmp_path / "node-1" / "meta.json").write_text('{"format_version": 1, "node_id": 1, "cluster_id": "c"}')
        for _ in range(2):
            with pytest.raises(StoreError, match="is missing or empty, although there are logs"):
                await nodes.start(1)


async def test_the_data_folder_of_another_node_is_refused(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        one, _, _ = await nodes.start_all()
        await nodes.stop(one)
        with pytest.raises(DataFolderError, match="belongs to node 1, this is node 9"):
            nodes.add(9)
            await nodes.start(9, nodes.config(9, data_dir=str(tmp_path / "node-1")))


async def test_a_member_of_three_started_without_peers_reports_a_missing_majority(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        one, _, _ = await nodes.start_all()
        await nodes.stop(one)
        with pytest.raises(ConfigError, match=r"voters \[1, 2, 3\], and no peers are set"):
            await nodes.start(1, nodes.config(1, peers=[]))
        await nodes.start(1)


# -- the majority ------------------------------------------------------------------------------------------------------


async def test_a_new_controller_replaces_a_dead_one_and_no_committed_metadata_is_lost(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        first = await nodes.controller()
        await first.metadata.propose(AllocateProducerIds(1, 10))
        await nodes.kill(first)
        second = await until(lambda: next((b for b in nodes.brokers.values() if b.is_controller), None))
        assert second.image.next_producer_id == 10
        await until(lambda: second.image.brokers[first.node_id].is_fenced, "the dead broker is fenced")
        back = await nodes.start(first.node_id)
        assert back.image.next_producer_id == 10
        assert not back.image.brokers[first.node_id].is_fenced


async def test_a_node_without_a_majority_logs_the_missing_nodes_and_commits_nothing(
    tmp_path: Path,
) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        survivor = await nodes.controller()
        gone = nodes.others(survivor)
        for broker in gone:
            await nodes.kill(broker)
        await until(lambda: not survivor.is_controller, "it cannot be sure to lead any more")
        with pytest.raises(NotController):
            await survivor.metadata.propose(AllocateProducerIds(1, 10))
        await until(lambda: not survivor.member.lease_is_valid())
        (lost,) = await until(lambda: nodes.events(survivor.node_id, "majority_lost"))
        assert lost["voters"] == [1, 2, 3]
        missing = sorted(line.partition(":")[0] for line in lost["missing"])
        assert missing == sorted(f"node {broker.node_id}" for broker in gone)
        client = await nodes.client(survivor)
        described = await client.call(ApiKey.METADATA, {"topics": None})
        assert [broker.node_id for broker in described.brokers]
        refused = await client.call(
            ApiKey.CREATE_TOPICS,
            {"topics": [{"name": "t", "num_partitions": 1, "replication_factor": 1}], "timeout": 1000},
        )
        assert refused.topics[0].error_code is ErrorCode.request_timed_out
        await nodes.start(gone[0].node_id)
        await until(lambda: nodes.events(survivor.node_id, "majority_found"))
        await until(survivor.member.lease_is_valid)


async def test_a_node_that_starts_without_a_majority_logs_the_missing_nodes_and_waits(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        starting = asyncio.create_task(nodes.start(1))
        (waiting, *_) = await until(lambda: nodes.events(1, "waiting_for_controller"))
        assert [line.partition(":")[0] for line in waiting["missing"]] == ["node 2", "node 3"]
        assert "refused" in waiting["missing"][0]
        assert not starting.done()
        await asyncio.gather(nodes.start(2), nodes.start(3))
        assert (await starting).is_ready


async def test_a_voter_with_an_empty_disk_rejoins_as_a_learner_and_becomes_a_voter_again(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        controller = await nodes.controller()
        lost = nodes.others(controller)[0]
        store = next(m.store for m in controller.member.raft.node.membership.members if m.node_id == lost.node_id)
        await nodes.kill(lost)
        shutil.rmtree(tmp_path / f"node-{lost.node_id}")
        back = await nodes.start(lost.node_id)
        await until(lambda: voters(back) == [1, 2, 3], "it votes again")
        assert next(m.store for m in back.member.raft.node.membership.members if m.node_id == lost.node_id) != store
        assert back.image.cluster_id == controller.image.cluster_id
        await until(lambda: stored_cluster_id(nodes, lost.node_id) == controller.image.cluster_id)


# -- joining and leaving -----------------------------------------------------------------------------------------------


async def test_a_fourth_node_joins_through_any_node_as_a_learner(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        one, two, three = await nodes.start_all()
        nodes.add(4)
        four = await nodes.start(4, nodes.config(4, peers=[3]))
        assert voters(four) == [1, 2, 3]
        assert learners(four) == [4]
        assert four.image.cluster_id == one.image.cluster_id
        for broker in (one, two, three):
            await until(partial(lambda broker: broker.member.peers.is_connected(4), broker))
            await until(partial(lambda broker: 4 in broker.image.brokers, broker))
        await nodes.kill(four)
        back = await nodes.start(4, nodes.config(4, peers=[3]))
        assert learners(back) == [4]


async def test_a_restarted_node_reaches_a_node_that_rejoined_while_it_was_down(tmp_path: Path) -> None:
    """Found by the simulator (five-nodes seed 592485851): the restarted node learned the address, then forgot it."""

    async with LocalNodes(tmp_path) as nodes:
        founders = {node_id: nodes.config(node_id) for node_id in (1, 2, 3)}
        await nodes.start_all()
        nodes.add(4)
        four = await nodes.start(4, nodes.config(4, peers=[1, 2, 3]))
        down = next(broker for broker in nodes.others(await nodes.controller()) if broker is not four)
        await until(lambda: down.member.peers.is_connected(4))
        await nodes.kill(down)
        other = next(broker for broker in nodes.others(four))
        answer = await nodes.administer(other, ApiKey.UNREGISTER_BROKER, {"broker_id": 4})
        assert answer.error_code is ErrorCode.none
        await nodes.kill(four)
        shutil.rmtree(nodes.folder / "node-4")
        await nodes.start(4, nodes.config(4, peers=[other.node_id]))
        back = await nodes.start(down.node_id, founders[down.node_id])
        await until(lambda: back.member.peers.is_connected(4))


async def test_one_node_grows_to_three_voters(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=1) as nodes:
        one = await nodes.start(1, nodes.config(1, peers=[]))
        nodes.add(2)
        await nodes.start(2, nodes.config(2, peers=[1]))
        assert voters(one) == [1]
        nodes.add(3)
        await nodes.start(3, nodes.config(3, peers=[1, 2]))
        await until(lambda: voters(one) == [1, 2, 3], "three nodes are there, three vote")
        await nodes.kill(one)
        await until(lambda: any(broker.is_controller for broker in nodes.brokers.values()))


async def test_a_learner_replaces_a_voter_that_leaves_for_good(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        nodes.add(4)
        await nodes.start(4)
        leaving = await nodes.controller()
        others = nodes.others(leaving)
        unregister = partial(nodes.administer, others[0], ApiKey.UNREGISTER_BROKER, {"broker_id": leaving.node_id})
        # The leaving node is the controller: another node takes over first, then the client retries.
        assert (await unregister()).error_code is ErrorCode.none
        remaining = sorted(broker.node_id for broker in others)
        for broker in others:
            await until(partial(lambda broker: voters(broker) == remaining, broker))
            await until(partial(lambda broker: sorted(broker.image.brokers) == remaining, broker))
        await until(lambda: nodes.events(leaving.node_id, "removed_from_cluster"))
        await nodes.stop(leaving)
        for broker in others:
            assert sorted(broker.image.brokers) == remaining
        with pytest.raises((StoreError, ConfigError), match="empty data folder"):
            await nodes.start(leaving.node_id)
        assert (await unregister()).error_code is ErrorCode.broker_id_not_registered


async def test_a_controller_hands_over_before_it_stops_cleanly(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        first = await nodes.controller()
        others = nodes.others(first)
        await nodes.stop(first)
        assert any(broker.member.raft.node.is_leader for broker in others)

        def has_left(broker: Broker) -> bool:
            registered = broker.image.brokers[first.node_id]
            return registered.is_shutting_down or registered.is_fenced

        # The follower applies later what the new controller has decided.
        await until(lambda: all(map(has_left, others)))


async def test_a_node_that_waits_for_a_majority_can_be_stopped(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        starting = asyncio.create_task(nodes.start(1))
        await until(lambda: 1 in nodes.brokers and nodes.events(1, "peer_not_connected"))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        broker = nodes.brokers.pop(1)
        await broker.stop()
        await asyncio.gather(nodes.start(1), nodes.start(2), nodes.start(3))


async def test_the_controller_allocates_distinct_producer_ids_to_every_broker(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        given = [await broker.producer_ids.next() for broker in brokers for _ in range(3)]
        assert len(set(given)) == len(given)


async def test_the_caller_receives_the_controllers_error(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        for broker in nodes.brokers.values():
            with pytest.raises(KafkaError) as raised:
                await broker.member.client.call(NewTopic("not a name"))
            assert raised.value.code is ErrorCode.invalid_topic_exception


async def test_a_node_whose_id_is_taken_over_stops_serving_and_reports_the_remedy(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await brokers[0].topics.create(NewTopic("orders", num_partitions=3))
        await until(lambda: all(len(broker.host.partitions) == 3 for broker in brokers))
        one = next(broker for broker in brokers if not broker.is_controller)
        before = dict(one.host.partitions)
        # The controller sees this when a node was silent for too long and another one registered with its id.
        other = msgspec.structs.replace(one.member.session.registration, incarnation=UUID(int=5), host="elsewhere")
        epoch = one.image.brokers[one.node_id].epoch
        await (await nodes.controller()).metadata.propose(
            lambda image: plan_registration(image, BrokerStates.of(image), other, is_session_alive=False)
        )
        await until(lambda: one.image.brokers[one.node_id].epoch > epoch)
        # From now on, the assignments of this node id belong to the other process.
        assert all(partition.is_closed and not partition.leads for partition in before.values())
        failure = await asyncio.wait_for(one.failed(), 10)
        assert isinstance(failure, ConfigError)
        assert "taken over by the node at elsewhere" in str(failure)
        assert "stop one of the two, or give it another id" in str(failure)
        assert not one.member.lease_is_valid()
