"""The registry of nodes that lead, follow or have no replica of `_schemas`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.support.eventually import until

from chronik.metadata.commands import ChangePartitions, PartitionChange, TopicChanges
from chronik.metadata.image import SCHEMAS_TOPIC
from chronik.node import schema_registry
from chronik.node.broker import Broker
from chronik.node.replicas.partition import Partition
from chronik.schemas.commands import Command
from chronik.schemas.errors import Code, Refused

REGISTRATIONS = 20
TIMEOUT_S = 20.0


def registration(number: int) -> Command:
    return Command("register", f"s{number}", {"body": {"schema": f'{{"type":"fixed","name":"F{number}","size":8}}'}})


async def test_a_caught_up_node_has_every_registration_that_was_answered(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        for number in range(REGISTRATIONS):
            answer = await brokers[number % 3].schemas.submit(registration(number))
            for broker in brokers:
                assert (await broker.schemas.caught_up()).by_id(answer["id"]) is not None


async def test_a_node_that_cannot_reach_the_leader_does_not_answer_404(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await brokers[0].schemas.submit(registration(0))
        topic = brokers[0].image.require_topic(SCHEMAS_TOPIC)
        leader = next(broker for broker in brokers if broker.node_id == topic.partitions[0].leader)
        survivor = nodes.others(leader)[0]
        unknown = Command("lookup", "s9", {"body": {"schema": '"int"'}})
        for broker in nodes.others(leader):
            await broker.schemas.current()
        for broker in (*nodes.others(leader)[1:], leader):  # The last one leaves no majority that could elect another.
            await nodes.kill(broker)
        with pytest.raises(Refused) as refused:
            await survivor.schemas.decide(unknown)
        assert refused.value.code == Code.UNKNOWN_LEADER


async def test_a_forwarded_command_does_not_outlive_the_answer_to_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise commands whose clients have got an error run when replicas return, perhaps hours later."""
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await brokers[0].schemas.submit(registration(0))
        topic = brokers[0].image.require_topic(SCHEMAS_TOPIC)
        leader = next(broker for broker in brokers if broker.node_id == topic.partitions[0].leader)
        other = nodes.others(leader)[0]
        with monkeypatch.context() as patched:
            patched.setattr(schema_registry, "TIMEOUT_S", 0.3)
            patched.setattr(Partition, "when_committed", lambda partition, end_offset, waiter: None)
            with pytest.raises(Refused) as refused:
                await other.schemas.submit(registration(1))
            assert refused.value.code == Code.TIMED_OUT
            await until(lambda: leader.schemas._waiting == 0)
        assert (await other.schemas.submit(registration(2)))["id"] == 2


async def test_a_view_changes_with_every_record_and_there_is_none_before_it_is_read(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        assert [broker.schemas.view() for broker in brokers] == [None] * 3
        views = []
        for number in range(3):
            await brokers[number % 3].schemas.submit(registration(number))
            for broker in brokers:
                state = await broker.schemas.caught_up()
                view = broker.schemas.view()
                assert view is not None and view[0] is state
                views.append(view)
        assert len({(id(state), offset) for state, offset in views}) == len(views)
        leader_id = brokers[0].image.require_topic(SCHEMAS_TOPIC).partitions[0].leader
        leader = next(broker for broker in brokers if broker.node_id == leader_id)
        follower = nodes.others(leader)[0]
        stale = follower.schemas.view()
        await leader.schemas.submit(registration(9))
        end_offset = leader.host.partitions[SCHEMAS_TOPIC, 0].high_watermark
        async with asyncio.timeout(TIMEOUT_S):
            while follower.host.partitions[SCHEMAS_TOPIC, 0].high_watermark < end_offset:
                await asyncio.sleep(0.01)
        # It has the record in its log, and has not read it.
        assert stale is not None and follower.schemas.view() is None


async def test_records_that_an_unclean_election_removes_are_not_answered_any_more(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 4, topic_defaults={"min.insync.replicas": 1}) as nodes:
        brokers = {broker.node_id: broker for broker in await nodes.start_all()}
        await brokers[1].schemas.submit(registration(0))
        topic = brokers[1].image.require_topic(SCHEMAS_TOPIC)
        assert len(topic.partitions[0].replicas) == 3, "one node reads from the leader"
        leader = topic.partitions[0].leader
        absent = next(node_id for node_id in topic.partitions[0].replicas if node_id != leader)
        await nodes.kill(brokers.pop(absent))
        assert (await brokers[leader].schemas.submit(registration(1)))["id"] == 2
        for broker in brokers.values():
            assert (await broker.schemas.caught_up()).by_id(2) is not None
        metadata = (await nodes.controller()).metadata
        now = metadata.image.require_topic(SCHEMAS_TOPIC).partitions[0]
        change = PartitionChange(0, now.partition_epoch, absent, (absent,), is_unclean=True)
        await metadata.propose(ChangePartitions((TopicChanges(topic.id, (change,)),)))
        brokers[absent] = await nodes.start(absent)

        async def answer(broker: Broker, schema_id: int) -> str | None:
            try:
                found = (await broker.schemas.current()).by_id(schema_id)
            except Refused as refused:  # Without a leader, the node that has no replica has no answer.
                return refused.message
            return None if found is None else found.text

        async def answers(schema_id: int) -> list[str | None]:
            return [await answer(broker, schema_id) for broker in brokers.values()]

        async with asyncio.timeout(TIMEOUT_S):
            while await answers(2) != [None] * 4:
                await asyncio.sleep(0.01)
        assert (await brokers[leader].schemas.submit(registration(5)))["id"] == 2
        for broker in brokers.values():
            await broker.schemas.caught_up()
        [text] = set(await answers(2))
        assert text is not None and "F5" in text
