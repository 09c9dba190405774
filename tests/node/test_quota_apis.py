"""AlterClientQuotas and DescribeClientQuotas, and quotas in a cluster."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.node.support_authorization import DeniesEverything
from tests.node.support_quotas import Client, QuotaWorld
from tests.support.eventually import until

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.serving.access import Access
from chronik.quotas.entities import QuotaKey
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

EXACT, DEFAULT, ANY = 0, 1, 2
ALICE, ALICE_APP, ANYBODY, APP, HOST = (
    {"user": "alice"},
    {"user": "alice", "client-id": "app"},
    {"user": None},
    {"client-id": "app"},
    {"ip": "10.0.0.9"},
)


def entities(response: Any) -> list[dict[str, str | None]]:
    assert response.error_code is ErrorCode.none, response.error_message
    return [{part.entity_type: part.entity_name for part in entry.entity} for entry in response.entries]


async def with_quotas() -> Client:
    client = await Client.open("admin")
    response = await client.alter(
        *((parts, {"request_percentage": 50.0}) for parts in (ALICE, ALICE_APP, ANYBODY, APP)),
        (HOST, {"connection_creation_rate": 5.0}),
    )
    assert [entry.error_code for entry in response.entries] == [ErrorCode.none] * 5
    return client


def test_a_filter_matches_exact_default_and_any_names() -> None:
    async def story() -> None:
        client = await with_quotas()
        for components, strict, expected in (
            ((), False, [ALICE, ALICE_APP, ANYBODY, APP, HOST]),
            ((), True, []),
            ((("user", EXACT, "alice"),), False, [ALICE, ALICE_APP]),
            ((("user", EXACT, "alice"),), True, [ALICE]),
            ((("user", DEFAULT, None),), False, [ANYBODY]),
            ((("user", ANY, None),), False, [ALICE, ALICE_APP, ANYBODY]),
            ((("user", ANY, None),), True, [ALICE, ANYBODY]),
            ((("user", ANY, None), ("client-id", EXACT, "app")), True, [ALICE_APP]),
            ((("client-id", ANY, None),), True, [APP]),
            ((("ip", EXACT, "::ffff:10.0.0.9"),), True, [HOST]),
            ((("user", EXACT, "nobody"),), False, []),
        ):
            found = entities(await client.describe(*components, strict=strict))
            assert sorted(map(str, found)) == sorted(map(str, expected)), (components, strict)

    with QuotaWorld() as world:
        world.run(story())


@pytest.mark.parametrize(
    "components, code",
    [
        ([("", EXACT, "a")], ErrorCode.invalid_request),
        ([("user", EXACT, None)], ErrorCode.invalid_request),
        ([("user", DEFAULT, "a")], ErrorCode.invalid_request),
        ([("user", ANY, "a")], ErrorCode.invalid_request),
        ([("user", 9, None)], ErrorCode.invalid_request),
        ([("user", EXACT, "a"), ("user", DEFAULT, None)], ErrorCode.invalid_request),
        ([("user", EXACT, "a"), ("ip", DEFAULT, None)], ErrorCode.invalid_request),
        ([("group", EXACT, "a")], ErrorCode.unsupported_version),
    ],
    ids=str,
)
def test_a_filter_that_makes_no_sense_is_refused(
    components: list[tuple[str, int, str | None]], code: ErrorCode
) -> None:
    async def story() -> ErrorCode:
        answered: ErrorCode = (await (await Client.open()).describe(*components)).error_code
        return answered

    with QuotaWorld() as world:
        assert world.run(story()) is code


def test_each_entry_of_an_alteration_has_its_own_outcome() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        response = await client.alter(
            (ALICE, {"producer_byte_rate": 5.0}),
            ({"group": "g"}, {"producer_byte_rate": 5.0}),
            (ANYBODY, {"producer_byte_rate": -5.0}),
            (HOST, {"producer_byte_rate": 5.0}),
            (APP, {"producer_byte_rate": 5.0}),
            (APP, {"consumer_byte_rate": 5.0}),
        )
        refused = ErrorCode.invalid_request
        assert [entry.error_code for entry in response.entries] == [
            ErrorCode.none,
            refused,
            refused,
            refused,
            refused,
            refused,
        ]
        assert entities(await client.describe()) == [ALICE]

    with QuotaWorld() as world:
        world.run(story(world))


def test_validate_only_changes_nothing_and_reports_the_same() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        entries = ((ALICE, {"producer_byte_rate": 5.0}), (ANYBODY, {"no_such_quota": 5.0}))
        checked = await client.alter(*entries, validate_only=True)
        assert not world.broker.image.client_quotas
        altered = await client.alter(*entries)
        codes = [[entry.error_code for entry in response.entries] for response in (checked, altered)]
        assert codes == [[ErrorCode.none, ErrorCode.invalid_request]] * 2
        assert len(world.broker.image.client_quotas) == 1

    with QuotaWorld() as world:
        world.run(story(world))


def test_quotas_need_rights_on_the_cluster() -> None:
    async def story(world: QuotaWorld) -> None:
        client, decisions = await Client.open(), DeniesEverything()
        (connection,) = world.broker.server._connections
        connection.access = Access("User:mallory", "10.0.0.1", decisions)
        assert (
            await client.set_quotas(ALICE, request_percentage=1)
        ).error_code is ErrorCode.cluster_authorization_failed
        assert (await client.describe()).error_code is ErrorCode.cluster_authorization_failed
        cluster = ResourceType.CLUSTER
        requested = [(operation, resource_type) for _, _, operation, resource_type, *_ in decisions.requested]
        assert requested == [(Operation.ALTER_CONFIGS, cluster), (Operation.DESCRIBE_CONFIGS, cluster)]
        assert not world.broker.image.client_quotas

    with QuotaWorld() as world:
        world.run(story(world))


# -- clusters ----------------------------------------------------------------------------------------------------------


async def test_a_batch_is_counted_once_on_the_node_that_received_it(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, default_replication_factor=1) as nodes:
        one, two, three = await nodes.start_all()
        clients = [Client(await nodes.client(broker)) for broker in (one, two, three)]
        await clients[0].create_topic()
        await until(lambda: all(broker.image.topics.get("t") for broker in (one, two, three)))
        await clients[0].set_quotas({"client-id": "harness"}, producer_byte_rate=1_000_000)
        await until(lambda: all(broker.server.quotas is not None for broker in (one, two, three)))
        assert all(broker.internal_server.quotas is None for broker in (one, two, three)), "other nodes are exempt"
        leader = one.image.topics["t"].partitions[0].leader
        entry = next(broker for broker in (one, two, three) if broker.node_id != leader)
        producer = clients[entry.node_id - 1]
        for _ in range(3):
            assert (await producer.produce(1_000)).throttle_ms == 0
        used = {broker.node_id: len(broker.quotas._rates[QuotaKey.PRODUCER_BYTE_RATE]) for broker in (one, two, three)}
        assert used == {broker.node_id: int(broker is entry) for broker in (one, two, three)}


async def test_the_controllers_throttle_time_mutes_the_client_where_it_is_connected(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, default_replication_factor=1) as nodes:
        brokers = await nodes.start_all()
        controller = await nodes.controller()
        entry = next(broker for broker in brokers if broker is not controller)
        client = Client(await nodes.client(entry))
        await client.set_quotas({"user": None}, controller_mutation_rate=1)
        assert (await client.create_topic("a", 12)).topics[0].error_code is ErrorCode.none
        refused = await client.create_topic("b", 1)
        assert refused.topics[0].error_code is ErrorCode.throttling_quota_exceeded
        assert 0 < refused.throttle_time.total_seconds() <= 1
        (connection,) = [each for each in entry.server._connections if each.is_muted]
        assert not any(peer.is_muted for broker in brokers for peer in broker.internal_server._connections)
        async with asyncio.timeout(10):
            assert (await client.create_topic("b", 1)).topics[0].error_code is ErrorCode.none
        assert not connection.is_closing


def test_every_response_with_the_field_reports_the_throttle_time() -> None:
    async def story(world: QuotaWorld) -> None:
        admin = await Client.open()
        ticks = count()
        world.broker.quotas.cpu_s = lambda: next(ticks) * 100.0
        await admin.set_quotas({"user": None}, request_percentage=0.001)
        requests: list[tuple[ApiKey, dict[str, Any]]] = [
            (ApiKey.METADATA, {"topics": []}),
            (ApiKey.API_VERSIONS, {"client_software_name": "a", "client_software_version": "1"}),
            (ApiKey.FIND_COORDINATOR, {"key_type": 0, "coordinator_keys": ["g"]}),
            (ApiKey.LIST_GROUPS, {}),
            (ApiKey.DESCRIBE_CLUSTER, {}),
            (ApiKey.HEARTBEAT, {"group_id": "g", "generation_id": 1, "member_id": "m"}),
            (ApiKey.ALTER_CLIENT_QUOTAS, {"entries": [], "validate_only": True}),
        ]
        for key, values in requests:
            response = await admin.call(key, values)
            assert response.throttle_time.total_seconds() == 1.0, key

    with QuotaWorld() as world:
        world.run(story(world))


async def test_topics_created_through_several_nodes_share_the_quota_of_the_controller(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, default_replication_factor=1, num_partitions=1) as nodes:
        brokers = await nodes.start_all()
        clients = [Client(await nodes.client(broker)) for broker in brokers]
        await clients[0].set_quotas({"client-id": "harness"}, controller_mutation_rate=0.1)
        await until(lambda: all(broker.image.client_quotas for broker in brokers))
        codes = []
        for number in range(9):
            values = {"topics": [{"name": f"auto-{number}"}], "allow_auto_topic_creation": True}
            answer = await clients[number % 3].call(ApiKey.METADATA, values)
            codes.append(answer.topics[0].error_code)
        # The bucket holds 1.1 tokens, and the second topic leaves a debt.
        assert codes == [ErrorCode.none] * 2 + [ErrorCode.leader_not_available] * 7
        charged = [broker.metrics.throttled_requests["controller_mutation"] for broker in brokers]
        assert sorted(charged) == [0, 0, 7]
