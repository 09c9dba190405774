"""Every API through the real server: without a right it is refused, does nothing and reveals nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.node.support_authorization import (
    ABSENT,
    ADMIN,
    ALICE,
    BATCH,
    CASES,
    CLUSTER,
    DESCRIBE_ORDERS,
    DESCRIBE_READERS,
    ENABLED,
    EVE,
    GROUP,
    LAST,
    ORDERS,
    PAYMENTS,
    READ_ORDERS,
    READERS,
    REFUSALS,
    SHARERS,
    TELEMETRY,
    TOPIC,
    TRANSACTIONAL_ID,
    WITHOUT_RIGHTS,
    WRITE_ORDERS,
    WRITE_PAYMENTS,
    Case,
    Names,
    allow,
    ask,
    ask_case,
    joins,
    login,
    set_acls,
)
from tests.node.support_wire import errors_of
from tests.support.eventually import until

from chronik.authorization.acls import Operation, PatternType, Permission
from chronik.client.connection import Connection
from chronik.metadata.commands import CreateAcls, DeleteAcls
from chronik.node.api_table import APIS
from chronik.node.broker import Broker
from chronik.node.config import Authorization
from chronik.node.serving.rights import RIGHTS
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

AUTHORIZATION_ERRORS = set(REFUSALS.values())


@dataclass
class World:
    """One node with a topic, a group with an offset and a transactional id, and a client of each principal."""

    nodes: LocalNodes
    broker: Broker
    admin: Connection
    alice: Connection
    eve: Connection
    anonymous: Connection

    def names(self, version: int, case: Case) -> Names:
        topic = self.broker.image.topics.get(ORDERS)
        by_id = version >= case.by_id_from and topic is not None
        return Names(version, topic_id=topic.id if by_id and topic else None)


async def make_resources(admin: Connection) -> None:
    new = {"name": ORDERS, "num_partitions": 1, "replication_factor": 1}
    created = await ask(admin, ApiKey.CREATE_TOPICS, 7, {"topics": [new], "timeout": 10_000, "validate_only": False})
    assert not errors_of(created)
    commit = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1}
    values: dict[str, Any] = {"group_id": READERS, "topics": [{"name": ORDERS, "partitions": [commit]}]}
    await ask(admin, ApiKey.FIND_COORDINATOR, 2, {"key": READERS})
    for epoch in (0, -1):
        assert not errors_of(await ask(admin, ApiKey.SHARE_GROUP_HEARTBEAT, 1, joins(Names(1), epoch)))
    committed = await ask(admin, ApiKey.OFFSET_COMMIT, 8, {**values, "generation_id_or_member_epoch": -1})
    assert not errors_of(committed)
    values = {"transactional_id": PAYMENTS, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1}
    await ask(admin, ApiKey.FIND_COORDINATOR, 2, {"key": PAYMENTS, "key_type": 1})
    assert not errors_of(await ask(admin, ApiKey.INIT_PRODUCER_ID, 4, values))


@asynccontextmanager
async def world(folder: Path, authorization: Authorization = ENABLED) -> AsyncIterator[World]:
    async with LocalNodes(folder, 1, default_replication_factor=1, authorization=authorization) as nodes:
        (broker,) = await nodes.start_all()
        clients = [await login(nodes, broker, principal) for principal in (ADMIN, ALICE, EVE, None)]
        await make_resources(clients[0])
        yield World(nodes, broker, *clients)


def cases() -> Iterator[tuple[ApiKey, Case, int]]:
    versions = {api.key: api.parsed_versions for api in APIS}
    for key in (*(key for key in CASES if key not in LAST), *LAST):
        for case in CASES[key]:
            lowest, highest = case.versions or versions[key]
            for version in range(lowest, highest + 1):
                yield key, case, version


def test_every_api_has_rights_and_a_request_that_tests_them() -> None:
    assert {api.key for api in APIS} <= set(RIGHTS)
    assert {api.key for api in APIS} == set(CASES) | WITHOUT_RIGHTS
    assert set(TELEMETRY) < WITHOUT_RIGHTS
    assert not any(RIGHTS[key] for key in WITHOUT_RIGHTS)


async def test_requests_without_a_right_are_refused_in_every_version(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        topics, broker = set(scene.broker.image.topics), scene.broker
        for key, case, version in cases():
            expected = {case.rights[0][1]} if case.rights and case.listed is None else set()
            if version < case.silent_below:
                expected = set()
            for principal, client in (("eve", scene.eve), ("anonymous", scene.anonymous)):
                response = await ask_case(client, key, case, scene.names(version, case))
                assert errors_of(response) == expected, (principal, key.name, version, response)
                assert case.listed is None or case.listed not in repr(response), (key.name, version)
                assert "secret" not in repr(response)
        assert set(broker.image.topics) == topics, "no request created or deleted a topic"
        assert not broker.image.acls
        partition = broker.partition(ORDERS, 0)
        assert partition is not None
        assert partition.log_end_offset == 0, "nothing was appended"


async def test_each_right_of_a_request_is_needed_and_all_together_suffice(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        assert not errors_of(await ask(scene.admin, ApiKey.PRODUCE, 12, CASES[ApiKey.PRODUCE][0].values(Names(12))))
        for key, case, version in cases():
            names = scene.names(version, case)
            rights = [acl for acl, _ in case.rights]
            for missing, error in case.rights:
                await set_acls(scene.broker, [acl for acl in [*rights, *case.also] if acl != missing])
                response = await ask_case(scene.alice, key, case, names)
                if case.listed is not None:
                    assert case.listed not in repr(response), (key.name, version)
                elif version >= case.silent_below:
                    assert errors_of(response) & AUTHORIZATION_ERRORS == {error}, (key.name, version, missing, response)
            await set_acls(scene.broker, [*rights, *case.also])
            response = await ask_case(scene.alice, key, case, names)
            if case is CASES[ApiKey.FETCH][1]:
                # The right does not make a client a replica: only nodes are.
                assert errors_of(response) <= {ErrorCode.cluster_authorization_failed}
                continue
            assert not errors_of(response) & AUTHORIZATION_ERRORS, (key.name, version, response)
            if case.listed is not None:
                assert case.listed in repr(response), (key.name, version, response)
        assert ORDERS not in scene.broker.image.topics, "the last request deletes the topic"


async def test_a_refusal_does_not_reveal_whether_the_resource_exists(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        for key, case, version in cases():
            if not case.hides_existence or version >= case.by_id_from:
                continue  # Kafka does not regard ids as secrets.
            names = scene.names(version, case)
            absent = replace(names, topic=ABSENT, group=ABSENT, share_group=ABSENT, transactional_id=ABSENT)
            existing = await ask(scene.eve, key, version, case.values(names))
            other = await ask(scene.eve, key, version, case.values(absent))
            shown = repr(other)
            for name in (ORDERS, READERS, SHARERS, PAYMENTS):
                if name in repr(existing):
                    assert shown.replace(ABSENT, name) == repr(existing), (key.name, version)
                    break
            else:
                assert shown == repr(existing), (key.name, version)


# -- single APIs -------------------------------------------------------------------------------------------------------


async def test_a_fetch_session_ends_when_the_right_is_withdrawn(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        await ask(scene.admin, ApiKey.PRODUCE, 12, CASES[ApiKey.PRODUCE][0].values(Names(12)))
        await set_acls(scene.broker, [READ_ORDERS])
        fetch = CASES[ApiKey.FETCH][0].values(Names(12))
        first = await ask(scene.alice, ApiKey.FETCH, 12, {**fetch, "session_id": 0, "session_epoch": 0})
        assert not errors_of(first)
        assert first.session_id
        empty = {**fetch, "topics": [], "session_id": first.session_id}
        # A session belongs to its principal: another one learns nothing from its id.
        stolen = await ask(scene.eve, ApiKey.FETCH, 12, {**empty, "session_epoch": 1})
        assert stolen.error_code is ErrorCode.fetch_session_id_not_found
        assert not errors_of(await ask(scene.alice, ApiKey.FETCH, 12, {**empty, "session_epoch": 1}))
        await set_acls(scene.broker, [])
        refused = await ask(scene.alice, ApiKey.FETCH, 12, {**empty, "session_epoch": 2})
        assert errors_of(refused) == {ErrorCode.topic_authorization_failed}
        await set_acls(scene.broker, [READ_ORDERS])
        assert not errors_of(await ask(scene.alice, ApiKey.FETCH, 12, {**empty, "session_epoch": 3}))


async def test_a_waiting_fetch_is_refused_when_the_right_is_withdrawn(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        await set_acls(scene.broker, [READ_ORDERS])
        loop = scene.broker.runtime.loop
        fetch = {**CASES[ApiKey.FETCH][0].values(Names(12)), "max_wait": 30_000}
        waiting = loop.create_task(ask(scene.alice, ApiKey.FETCH, 12, fetch))
        partition = scene.broker.partition(ORDERS, 0)
        assert partition is not None
        await until(lambda: partition._waits.fetches)
        await set_acls(scene.broker, [])
        await ask(scene.admin, ApiKey.PRODUCE, 12, CASES[ApiKey.PRODUCE][0].values(Names(12)))
        response = await waiting
        assert errors_of(response) == {ErrorCode.topic_authorization_failed}
        assert b"secret" not in bytes(response.responses[0].partitions[0].records or b"")


async def test_a_share_session_at_a_follower_does_not_name_the_leader_of_an_unreadable_topic(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 2, default_replication_factor=1, authorization=ENABLED) as nodes:
        brokers = await nodes.start_all()
        controller = await until(lambda: next((each for each in brokers if each.is_controller), None))
        rights = [allow(Operation.READ, GROUP, READERS, principal=each) for each in (ALICE, EVE)]
        await set_acls(controller, [*rights, allow(Operation.READ, TOPIC, ORDERS, principal=ALICE)])
        admin = await login(nodes, controller, ADMIN)
        new = {"name": ORDERS, "num_partitions": 1, "replication_factor": 1}
        await ask(admin, ApiKey.CREATE_TOPICS, 7, {"topics": [new], "timeout": 10_000, "validate_only": False})
        await until(lambda: all(ORDERS in each.image.topics for each in brokers))
        topic = controller.image.topics[ORDERS]
        follower = next(each for each in brokers if each.node_id != topic.partitions[0].leader)
        for principal, version, error in (
            (EVE, 1, ErrorCode.topic_authorization_failed),
            (ALICE, 2, ErrorCode.not_leader_or_follower),
        ):
            client = await login(nodes, follower, principal)
            for key in (ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE):
                response = await ask_case(client, key, CASES[key][0], Names(version, topic_id=topic.id))
                assert errors_of(response) == {error}
                assert bool(response.node_endpoints) == (principal == ALICE)


async def test_a_request_with_several_topics_fails_only_for_the_unauthorized(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        other = {"name": "other", "num_partitions": 1, "replication_factor": 1}
        values = {"topics": [other], "timeout": 10_000, "validate_only": False}
        await ask(scene.admin, ApiKey.CREATE_TOPICS, 7, values)
        await set_acls(scene.broker, [WRITE_ORDERS])
        partition = {"index": 0, "records": BATCH}
        topics = [{"name": name, "partition_data": [partition]} for name in ("other", ORDERS)]
        produce = {"transactional_id": None, "acks": -1, "timeout": 5_000, "topic_data": topics}
        response = await ask(scene.alice, ApiKey.PRODUCE, 12, produce)
        outcomes = {topic.name: topic.partition_responses[0].error_code for topic in response.responses}
        assert outcomes == {"other": ErrorCode.topic_authorization_failed, ORDERS: ErrorCode.none}
        refused = scene.broker.partition("other", 0)
        assert refused is not None
        assert refused.log_end_offset == 0


async def test_metadata_of_all_topics_shows_only_visible_ones(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        await set_acls(scene.broker, [WRITE_ORDERS])
        for version in (0, 5, 12):
            everything = await ask(scene.alice, ApiKey.METADATA, version, {"topics": None if version else []})
            assert [topic.name for topic in everything.topics] == [ORDERS]
        assert len((await ask(scene.admin, ApiKey.METADATA, 12, {"topics": None})).topics) == 3


async def test_authorized_operations_are_those_of_the_client(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        await set_acls(scene.broker, [WRITE_ORDERS, DESCRIBE_READERS])
        values = {
            "topics": [{"name": ORDERS}],
            "include_topic_authorized_operations": True,
            "include_cluster_authorized_operations": True,
        }
        metadata = await ask(scene.alice, ApiKey.METADATA, 8, values)
        expected = 1 << Operation.WRITE | 1 << Operation.DESCRIBE
        assert metadata.topics[0].topic_authorized_operations == expected
        assert metadata.cluster_authorized_operations == 0
        described = {"groups": [READERS], "include_authorized_operations": True}
        groups = await ask(scene.alice, ApiKey.DESCRIBE_GROUPS, 5, described)
        assert groups.groups[0].authorized_operations == 1 << Operation.DESCRIBE
        asks = {"include_cluster_authorized_operations": True, "endpoint_type": 1}
        cluster = await ask(scene.alice, ApiKey.DESCRIBE_CLUSTER, 1, asks)
        assert cluster.cluster_authorized_operations == 0
        await set_acls(scene.broker, [allow(Operation.ALTER, CLUSTER)])
        cluster = await ask(scene.alice, ApiKey.DESCRIBE_CLUSTER, 1, asks)
        assert cluster.cluster_authorized_operations == 1 << Operation.ALTER | 1 << Operation.DESCRIBE


async def test_configs_of_a_new_topic_are_shown_only_with_the_right(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        create = allow(Operation.CREATE, TOPIC, "made")
        values = {
            "topics": [{"name": "made", "num_partitions": 1, "replication_factor": 1}],
            "timeout": 10_000,
            "validate_only": True,
        }
        await set_acls(scene.broker, [create])
        (topic,) = (await ask(scene.alice, ApiKey.CREATE_TOPICS, 7, values)).topics
        assert (topic.error_code, topic.topic_config_error_code) == (
            ErrorCode.none,
            ErrorCode.topic_authorization_failed,
        )
        assert (topic.num_partitions, topic.replication_factor, topic.configs) == (-1, -1, ())
        await set_acls(scene.broker, [create, allow(Operation.DESCRIBE_CONFIGS, TOPIC, "made")])
        (topic,) = (await ask(scene.alice, ApiKey.CREATE_TOPICS, 7, values)).topics
        assert topic.topic_config_error_code == ErrorCode.none
        assert topic.num_partitions == 1
        assert topic.configs


async def test_an_id_of_a_topic_to_delete_reveals_its_name_only_to_describers(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        topic_id = scene.broker.image.topics[ORDERS].id
        values: dict[str, Any] = {"topics": [{"name": None, "topic_id": topic_id}], "timeout": 5_000}
        for acls, name in (([], None), ([DESCRIBE_ORDERS], ORDERS)):
            await set_acls(scene.broker, acls)
            (result,) = (await ask(scene.alice, ApiKey.DELETE_TOPICS, 6, values)).responses
            assert (result.error_code, result.name) == (ErrorCode.topic_authorization_failed, name)
        # Naming one topic by id and by name must not reveal that they are the same.
        await set_acls(scene.broker, [])
        values["topics"].append({"name": ORDERS, "topic_id": None})
        response = await ask(scene.alice, ApiKey.DELETE_TOPICS, 6, values)
        assert errors_of(response) == {ErrorCode.topic_authorization_failed}


async def test_offsets_of_all_topics_omit_those_that_the_client_may_not_see(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        for version in range(2, 11):
            values = {"group_id": READERS, "topics": None, "groups": [{"group_id": READERS, "topics": None}]}
            for acls, count in (([DESCRIBE_READERS], 0), ([DESCRIBE_READERS, DESCRIBE_ORDERS], 1)):
                await set_acls(scene.broker, acls)
                response = await ask(scene.alice, ApiKey.OFFSET_FETCH, version, values)
                assert not errors_of(response)
                topics = response.topics if version < 8 else response.groups[0].topics
                assert len(topics) == count, version


async def test_a_described_transaction_omits_topics_that_the_client_may_not_see(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        values = {"transactional_id": PAYMENTS, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1}
        producer = await ask(scene.admin, ApiKey.INIT_PRODUCER_ID, 4, values)
        added = await ask(
            scene.admin,
            ApiKey.ADD_PARTITIONS_TO_TXN,
            3,
            {
                "v3_and_below_transactional_id": PAYMENTS,
                "v3_and_below_producer_id": producer.producer_id,
                "v3_and_below_producer_epoch": producer.producer_epoch,
                "v3_and_below_topics": [{"name": ORDERS, "partitions": [0]}],
            },
        )
        assert not errors_of(added)
        for acls, topics in (([WRITE_PAYMENTS], []), ([WRITE_PAYMENTS, DESCRIBE_ORDERS], [ORDERS])):
            await set_acls(scene.broker, acls)
            asked = {"transactional_ids": [PAYMENTS]}
            response = await ask(scene.alice, ApiKey.DESCRIBE_TRANSACTIONS, 0, asked)
            (state,) = response.transaction_states
            assert (state.error_code, state.transaction_state) == (ErrorCode.none, "Ongoing")
            assert [topic.topic for topic in state.topics] == topics


async def test_an_acl_for_a_host_range_applies_to_its_clients_only(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        metadata = CASES[ApiKey.METADATA][0].values(Names(12))
        for host, expected in (("127.0.0.0/8", set()), ("10.0.0.0/8", {ErrorCode.topic_authorization_failed})):
            await set_acls(scene.broker, [allow(Operation.DESCRIBE, TOPIC, ORDERS, host=host)])
            assert errors_of(await ask(scene.alice, ApiKey.METADATA, 12, metadata)) == expected


async def test_a_deny_beats_an_allow_and_super_users_are_exempt(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        everyone = allow(Operation.ALL, TOPIC, "*", principal="User:*", permission=Permission.DENY)
        await set_acls(scene.broker, [WRITE_ORDERS, everyone])
        produce = CASES[ApiKey.PRODUCE][0].values(Names(12))
        assert errors_of(await ask(scene.alice, ApiKey.PRODUCE, 12, produce)) == {ErrorCode.topic_authorization_failed}
        assert not errors_of(await ask(scene.admin, ApiKey.PRODUCE, 12, produce))


async def test_everyone_may_use_resources_without_acls_if_the_node_says_so(tmp_path: Path) -> None:
    open_by_default = Authorization(enabled=True, super_users=(ADMIN,), allow_everyone_if_no_acl_found=True)
    async with world(tmp_path, open_by_default) as scene:
        produce = CASES[ApiKey.PRODUCE][0].values(Names(12))
        assert not errors_of(await ask(scene.eve, ApiKey.PRODUCE, 12, produce))
        await set_acls(scene.broker, [WRITE_ORDERS])
        assert errors_of(await ask(scene.eve, ApiKey.PRODUCE, 12, produce)) == {ErrorCode.topic_authorization_failed}


async def test_an_acks_0_producer_without_the_right_is_disconnected(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        produce = {**CASES[ApiKey.PRODUCE][0].values(Names(12)), "acks": 0}
        with pytest.raises(Exception, match=r"(?i)closed|lost|connection"):
            await ask(scene.eve, ApiKey.PRODUCE, 12, produce)


# -- audit -------------------------------------------------------------------------------------------------------------


async def test_denials_are_audited_once_and_counted_by_operation(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        produce = CASES[ApiKey.PRODUCE][0].values(Names(12))
        for _ in range(5):
            await ask(scene.eve, ApiKey.PRODUCE, 12, produce)
        lines = [line for line in scene.nodes.events(1, "denied") if line["principal"] == EVE]
        assert [
            (line["component"], line["host"], line["api"], line["operation"], line["resource"]) for line in lines
        ] == [("authorizer", "127.0.0.1", "Produce", "WRITE", "TOPIC:orders")]
        assert scene.broker.metrics.authorization_denials["WRITE"] == 5
        text = scene.broker.metrics.exposition().decode()
        assert 'chronik_authorization_denials_total{operation="WRITE"} 5.0' in text
        # What a listing omits was not requested.
        before = len(scene.nodes.events(1, "denied"))
        await ask(scene.eve, ApiKey.METADATA, 12, {"topics": None})
        await ask(scene.eve, ApiKey.LIST_GROUPS, 4, {})
        await ask(scene.eve, ApiKey.LIST_TRANSACTIONS, 0, {"state_filters": [], "producer_id_filters": []})
        assert len(scene.nodes.events(1, "denied")) == before


# -- several nodes -----------------------------------------------------------------------------------------------------


async def test_every_node_authorizes_the_client_whoever_answers(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, authorization=ENABLED) as nodes:
        brokers = await nodes.start_all()
        controller = await nodes.controller()
        other = nodes.others(controller)[0]
        admin, alice, eve = [await login(nodes, other, each) for each in (ADMIN, ALICE, EVE)]
        new = {"name": ORDERS, "num_partitions": 3, "replication_factor": 3}
        create = {"topics": [new], "timeout": 10_000, "validate_only": False}
        # The controller answers, and authorizes the client of the node that forwards.
        refused = await ask(eve, ApiKey.CREATE_TOPICS, 7, create)
        assert errors_of(refused) == {ErrorCode.topic_authorization_failed}
        denied = [line for line in nodes.events(controller.node_id, "denied") if line["principal"] == EVE]
        assert [(line["api"], line["host"]) for line in denied] == [("CreateTopics", "127.0.0.1")]
        creation = {
            "resource_type": CLUSTER,
            "resource_name": "kafka-cluster",
            "resource_pattern_type": PatternType.LITERAL,
            "principal": ALICE,
            "host": "127.0.0.0/8",
            "operation": Operation.CREATE,
            "permission_type": Permission.ALLOW,
        }
        assert errors_of(await ask(alice, ApiKey.CREATE_ACLS, 3, {"creations": [creation]})) == {
            ErrorCode.cluster_authorization_failed
        }
        assert not errors_of(await ask(admin, ApiKey.CREATE_ACLS, 3, {"creations": [creation]}))
        await until(lambda: all(broker.image.acls for broker in brokers))
        allowed = await ask(alice, ApiKey.CREATE_TOPICS, 7, create)
        assert {topic.error_code for topic in allowed.topics} == {ErrorCode.none}
        # Each node checks a batch before it forwards it to the leader.
        produce = {
            "transactional_id": None,
            "acks": -1,
            "timeout": 10_000,
            "topic_data": [
                {"name": ORDERS, "partition_data": [{"index": index, "records": BATCH} for index in range(3)]}
            ],
        }
        assert errors_of(await ask(eve, ApiKey.PRODUCE, 12, produce)) == {ErrorCode.topic_authorization_failed}
        await controller.metadata.propose(CreateAcls((WRITE_ORDERS,)))
        await until(lambda: WRITE_ORDERS in other.image.acls)
        assert not errors_of(await ask(alice, ApiKey.PRODUCE, 12, produce))
        ends = [controller.partition(ORDERS, index) for index in range(3)]
        await until(lambda: all(each is not None and each.high_watermark == 1 for each in ends))
        await controller.metadata.propose(DeleteAcls((WRITE_ORDERS,)))
        await until(lambda: WRITE_ORDERS not in other.image.acls)
        assert errors_of(await ask(alice, ApiKey.PRODUCE, 12, produce)) == {ErrorCode.topic_authorization_failed}
        # Nodes are not clients: replication works without any ACL, and ACLs survive a restart.
        await nodes.stop(other)
        again = await nodes.start(other.node_id)
        assert again.image.acls == controller.image.acls
        client = await login(nodes, again, EVE)
        assert errors_of(await ask(client, ApiKey.PRODUCE, 12, produce)) == {ErrorCode.topic_authorization_failed}


# -- ACL APIs ----------------------------------------------------------------------------------------------------------


def described(response: Any) -> set[tuple[Any, ...]]:
    return {
        (resource.resource_type, resource.resource_name, resource.pattern_type, acl.principal, acl.operation)
        for resource in response.resources
        for acl in resource.acls
    }


def creation(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "resource_type": TOPIC,
        "resource_name": name,
        "resource_pattern_type": PatternType.LITERAL,
        "principal": ALICE,
        "host": "*",
        "operation": Operation.READ,
        "permission_type": Permission.ALLOW,
        **fields,
    }


def acl_filter(**fields: Any) -> dict[str, Any]:
    return {
        "resource_type_filter": 1,
        "resource_name_filter": None,
        "pattern_type_filter": PatternType.ANY,
        "principal_filter": None,
        "host_filter": None,
        "operation": Operation.ANY,
        "permission_type": Permission.ANY,
        **fields,
    }


async def test_acls_are_created_described_and_deleted_in_every_version(tmp_path: Path) -> None:
    async with world(tmp_path) as scene:
        admin = scene.admin
        for version in (1, 2, 3):
            creations = [
                creation("a"),
                creation("pre", resource_pattern_type=PatternType.PREFIXED),
                creation("", operation=Operation.READ),
                creation("b", resource_pattern_type=PatternType.MATCH),
                creation("b", principal="nobody"),
                creation("other", resource_type=CLUSTER),
                creation("b", operation=99),
                creation("g", resource_type=GROUP),
                creation("t", resource_type=TRANSACTIONAL_ID, operation=Operation.WRITE),
            ]
            results = (await ask(admin, ApiKey.CREATE_ACLS, version, {"creations": creations})).results
            ok, bad = ErrorCode.none, ErrorCode.invalid_request
            assert [each.error_code for each in results] == [ok, ok, bad, bad, bad, bad, bad, ok, ok]
            assert all(each.error_message for each in results if each.error_code is bad)
            everything = await ask(admin, ApiKey.DESCRIBE_ACLS, version, acl_filter())
            assert described(everything) == {
                (TOPIC, "a", PatternType.LITERAL, ALICE, Operation.READ),
                (TOPIC, "pre", PatternType.PREFIXED, ALICE, Operation.READ),
                (GROUP, "g", PatternType.LITERAL, ALICE, Operation.READ),
                (TRANSACTIONAL_ID, "t", PatternType.LITERAL, ALICE, Operation.WRITE),
            }
            matched = acl_filter(
                resource_type_filter=TOPIC, resource_name_filter="prefix", pattern_type_filter=PatternType.MATCH
            )
            found = await ask(admin, ApiKey.DESCRIBE_ACLS, version, matched)
            assert [resource.resource_name for resource in found.resources] == ["pre"]
            filters = [matched, acl_filter(operation=Operation.WRITE), acl_filter(operation=99), acl_filter()]
            deleted = (await ask(admin, ApiKey.DELETE_ACLS, version, {"filters": filters})).filter_results
            names = [{acl.resource_name for acl in result.matching_acls} for result in deleted]
            assert names == [{"pre"}, {"t"}, set(), {"a", "g", "pre", "t"}]
            assert [result.error_code for result in deleted] == [ok, ok, bad, ok]
            assert not scene.broker.image.acls


async def test_acl_apis_without_an_authorizer_answer_security_disabled(tmp_path: Path) -> None:
    async with world(tmp_path, Authorization()) as scene:
        for key, values in (
            (ApiKey.DESCRIBE_ACLS, acl_filter()),
            (ApiKey.CREATE_ACLS, {"creations": [creation("a")]}),
            (ApiKey.DELETE_ACLS, {"filters": [acl_filter()]}),
        ):
            for version in (1, 2, 3):
                response = await ask(scene.anonymous, key, version, values)
                assert errors_of(response) == {ErrorCode.security_disabled}
        assert not scene.broker.image.acls


async def test_a_cluster_refuses_more_acls_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik.node.apis.create_acls.ACLS_MAX", 3)
    monkeypatch.setattr("chronik.node.apis.create_acls.ACLS_PER_REQUEST_MAX", 4)
    monkeypatch.setattr("chronik.node.apis.delete_acls.ACLS_PER_REQUEST_MAX", 2)
    async with world(tmp_path) as scene:
        admin = scene.admin

        async def create(*names: str) -> set[ErrorCode]:
            values = {"creations": [creation(name) for name in names]}
            return errors_of(await ask(admin, ApiKey.CREATE_ACLS, 3, values))

        assert await create("a", "b") == set()
        assert await create("a", "b", "c") == set()
        assert await create("a", "d") == {ErrorCode.policy_violation}
        assert await create(*"abcde") == {ErrorCode.policy_violation}
        assert len(scene.broker.image.acls) == 3
        refused = await ask(admin, ApiKey.DELETE_ACLS, 3, {"filters": [acl_filter()]})
        assert errors_of(refused) == {ErrorCode.policy_violation}
        assert len(scene.broker.image.acls) == 3
