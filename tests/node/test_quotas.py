"""Clients over a quota are answered at once and muted; clients within theirs notice nothing. All in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import pytest
from tests.node.support_quotas import (
    ANONYMOUS_USER,
    NODE_ADDRESS,
    PORT,
    PRODUCE_VERSION,
    Client,
    QuotaWorld,
    fetched_bytes,
    produce_request,
)

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.node.serving import connection_quotas
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode
from chronik.wire.produce import read_produce_response

RATE = 1_000_000
BATCH_BYTES = 100_000
BURST_S = 10
"""A client that was idle may use the quota of all windows but one at once."""
QUICK_S = 0.5
"""Far more than a request takes here, far less than a throttle time."""


def elapsed(world: QuotaWorld) -> Callable[[], float]:
    started_s = world.now_s
    return lambda: world.now_s - started_s


# -- produce -----------------------------------------------------------------------------------------------------------


def test_a_producer_is_held_to_its_quota_and_another_client_is_not() -> None:
    async def story(world: QuotaWorld) -> None:
        admin, slow, free = await Client.open("admin"), await Client.open("slow"), await Client.open("free")
        await admin.create_topic()
        await admin.set_quotas({"client-id": "slow"}, producer_byte_rate=RATE)
        seconds = elapsed(world)
        throttles, produced = [], 0
        while seconds() < 30:
            response = await slow.produce(BATCH_BYTES)
            produced += BATCH_BYTES
            throttles.append(response.throttle_ms)
            before_s = seconds()
            assert (await free.produce(BATCH_BYTES)).throttle_ms == 0
            assert seconds() - before_s < QUICK_S
        assert throttles[0] == 0, "an idle client has its burst"
        assert sum(1 for throttle_ms in throttles if throttle_ms) > 10
        assert produced <= RATE * (seconds() + BURST_S) + BATCH_BYTES
        assert produced >= RATE * seconds() * 0.7, "the client is not throttled far below its quota either"

    with QuotaWorld() as world:
        world.run(story(world))
        assert world.broker.metrics.throttled_requests["produce"] > 10
        assert world.broker.metrics.throttle_ms["produce"] > 10_000
        (line,) = world.logged("client_throttled")[:1]
        assert '"client":"slow"' in line.replace(" ", "")
        assert len(world.logged("client_throttled")) == 1, "at most once a minute for each bucket"


def test_a_throttled_response_is_sent_at_once_and_the_next_request_waits() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        await client.create_topic()
        await client.set_quotas({"user": ANONYMOUS_USER}, producer_byte_rate=10_000)
        seconds = elapsed(world)
        # 200 KB are 20 s of the quota, of which the first 10 are the burst.
        throttle_ms = (await client.produce(200_000)).throttle_ms
        assert 9_500 < throttle_ms < 11_500
        assert seconds() < QUICK_S
        await client.call(ApiKey.METADATA, {"topics": []})
        assert throttle_ms / 1000 - QUICK_S < seconds() < throttle_ms / 1000 + QUICK_S

    with QuotaWorld() as world:
        world.run(story(world))


def test_pipelined_requests_after_the_throttled_one_wait_too() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        await client.create_topic()
        await client.set_quotas({"user": None}, producer_byte_rate=10_000)
        seconds = elapsed(world)
        first, second = client.send_produce(200_000), client.send_produce(10)
        throttle_ms = read_produce_response(PRODUCE_VERSION, await first).throttle_ms
        assert throttle_ms > 9_000 and seconds() < QUICK_S
        await second
        assert seconds() >= throttle_ms / 1000 - QUICK_S
        assert world.broker.server._connections, "the connection is still open"

    with QuotaWorld() as world:
        world.run(story(world))


def test_a_producer_without_acks_is_muted_as_well() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        await client.create_topic()
        await client.set_quotas({"user": None}, producer_byte_rate=10_000)
        seconds = elapsed(world)
        client.connection.send_unanswered(ApiKey.PRODUCE, PRODUCE_VERSION, produce_request(200_000, acks=0))
        await client.call(ApiKey.METADATA, {"topics": []})
        assert 9 < seconds() < 12

    with QuotaWorld() as world:
        world.run(story(world))


def test_clients_of_one_user_share_its_quota_and_default_clients_do_not() -> None:
    async def story() -> None:
        admin = await Client.open("admin")
        await admin.create_topic()
        one, two = await Client.open("one"), await Client.open("two")
        await admin.set_quotas({"client-id": None}, producer_byte_rate=10_000)
        assert (await one.produce(90_000)).throttle_ms == 0
        assert (await two.produce(90_000)).throttle_ms == 0
        await admin.set_quotas({"user": ANONYMOUS_USER}, producer_byte_rate=10_000)
        assert (await one.produce(90_000)).throttle_ms == 0
        assert (await two.produce(90_000)).throttle_ms > 0

    with QuotaWorld() as world:
        world.run(story())


# -- the muted connection ----------------------------------------------------------------------------------------------


def test_a_muted_connection_notices_that_its_client_closes() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        await client.create_topic()
        await client.set_quotas({"user": None}, producer_byte_rate=1_000)
        assert (await client.produce(200_000)).throttle_ms > 100_000
        assert len(world.broker.server._connections) == 1
        client.close()
        await asyncio.sleep(QUICK_S)
        assert not world.broker.server._connections

    with QuotaWorld() as world:
        world.run(story(world))


def test_a_muted_connection_is_not_idle() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        idle = await Client.open("idle")
        await client.create_topic()
        await client.set_quotas({"user": None}, producer_byte_rate=1_000)
        throttle_ms = (await client.produce(100_000)).throttle_ms
        assert throttle_ms > 80_000
        await asyncio.sleep(60)
        assert idle.connection.is_closed
        assert not client.connection.is_closed
        await client.call(ApiKey.METADATA, {"topics": []})

    with QuotaWorld(connection_idle_ms_max=20_000) as world:
        world.run(story(world))


def test_removing_a_quota_lets_others_continue_and_muted_ones_within_their_time() -> None:
    async def story(world: QuotaWorld) -> None:
        admin, client = await Client.open("admin"), await Client.open()
        await admin.create_topic()
        await admin.set_quotas({"client-id": "app"}, producer_byte_rate=10_000)
        throttle_ms = (await client.produce(200_000)).throttle_ms
        seconds = elapsed(world)
        await admin.set_quotas({"client-id": "app"}, producer_byte_rate=None)
        assert world.broker.server.quotas is None
        other = await Client.open()
        assert (await other.produce(200_000)).throttle_ms == 0
        assert seconds() < QUICK_S
        assert (await client.produce(200_000)).throttle_ms == 0
        assert seconds() <= throttle_ms / 1000 + QUICK_S

    with QuotaWorld() as world:
        world.run(story(world))


def test_quotas_survive_a_restart() -> None:
    async def set_quota() -> None:
        client = await Client.open()
        await client.create_topic()
        await client.set_quotas({"user": None, "client-id": "app"}, producer_byte_rate=10_000)

    async def is_throttled() -> bool:
        client = await Client.open()
        (entry,) = (await client.describe()).entries
        assert [(value.key, value.value) for value in entry.values] == [("producer_byte_rate", 10_000.0)]
        return (await client.produce(200_000)).throttle_ms > 0

    with QuotaWorld() as world:
        world.run(set_quota())
        world.restart()
        assert world.run(is_throttled())


# -- fetch -------------------------------------------------------------------------------------------------------------


def test_a_consumer_over_its_quota_gets_empty_responses_and_every_record_in_time() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        await client.create_topic()
        for _ in range(20):
            await client.produce(BATCH_BYTES)
        await client.set_quotas({"client-id": "app"}, consumer_byte_rate=50_000)
        seconds = elapsed(world)
        offset, received, empty, throttles = 0, 0, 0, 0
        while offset < 20:
            before_s = seconds()
            response = await client.fetch(offset, max_bytes=BATCH_BYTES)
            size = fetched_bytes(response)
            received += size
            offset += bool(size)
            if response.throttle_ms:
                throttles += 1
                assert size == 0 and response.topics == []
                empty += 1
            assert seconds() - before_s < 30
        assert throttles >= 2 and empty == throttles
        assert received <= 50_000 * (seconds() + BURST_S) + BATCH_BYTES
        assert seconds() < 50, "2 MB take 40 s"
        free = await Client.open("free")
        assert fetched_bytes(await free.fetch(0)) >= BATCH_BYTES

    with QuotaWorld() as world:
        world.run(story(world))
        assert world.broker.metrics.throttled_requests["fetch"] >= 2


def test_a_response_that_was_replaced_by_an_empty_one_is_not_counted() -> None:
    async def story() -> None:
        client = await Client.open()
        await client.create_topic()
        for size_bytes in (300_000, 50_000):
            await client.produce(size_bytes)
        await client.set_quotas({"client-id": "app"}, consumer_byte_rate=50_000)
        assert fetched_bytes(await client.fetch(0, max_bytes=1)) > 300_000
        assert fetched_bytes(await client.fetch(0, max_bytes=1)) == 0
        # Another connection: the first one is muted.
        response = await (await Client.open()).fetch(1, max_bytes=1)
        assert fetched_bytes(response) > 50_000 and response.throttle_ms == 0

    with QuotaWorld() as world:
        world.run(story())


def test_a_batch_larger_than_the_quota_of_all_windows_reaches_the_consumer() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        await client.create_topic()
        await client.produce(BATCH_BYTES)
        await client.set_quotas({"client-id": "app"}, consumer_byte_rate=5_000)
        seconds = elapsed(world)
        response = await client.fetch()
        assert fetched_bytes(response) >= BATCH_BYTES
        assert response.throttle_ms > 9_000 and seconds() < QUICK_S
        await client.fetch()
        assert seconds() > response.throttle_ms / 1000 - QUICK_S

    with QuotaWorld() as world:
        world.run(story(world))


def test_a_throttled_fetch_creates_no_session_and_keeps_an_open_one() -> None:
    async def story(world: QuotaWorld) -> None:
        admin, client = await Client.open("admin"), await Client.open()
        await admin.create_topic()
        await admin.produce(BATCH_BYTES)
        opened = await client.fetch(session=(0, 0))
        assert opened.session_id and fetched_bytes(opened)
        await admin.set_quotas({"client-id": "app"}, consumer_byte_rate=11_000)
        assert (await client.fetch(session=(opened.session_id, 1))).throttle_ms == 0
        throttled = await client.fetch(session=(opened.session_id, 2))
        assert throttled.throttle_ms and throttled.session_id == opened.session_id and throttled.error_code == 0
        follow = await client.fetch(session=(opened.session_id, 3))
        assert follow.error_code == 0
        other = await Client.open()
        response = await other.fetch(session=(0, 0))
        assert response.throttle_ms and response.session_id == 0

    with QuotaWorld() as world:
        world.run(story(world))


# -- request time ------------------------------------------------------------------------------------------------------


def test_a_client_that_takes_too_much_of_the_loops_time_is_throttled() -> None:
    async def story(world: QuotaWorld) -> None:
        admin, client = await Client.open("admin"), await Client.open()
        await admin.create_topic()
        # Each look at the CPU clock shows 100 ms more: a request takes at least that long.
        ticks = count()
        world.broker.quotas.cpu_s = lambda: 0.1 * next(ticks)
        await admin.set_quotas({"client-id": "app"}, request_percentage=20)
        seconds = elapsed(world)
        throttles = []
        requests = 0
        while seconds() < 60:
            if requests % 3 == 0:
                throttles.append((await client.produce(10)).throttle_ms)
            elif requests % 3 == 1:
                throttles.append((await client.fetch()).throttle_ms)
            else:
                metadata = await client.call(ApiKey.METADATA, {"topics": []})
                throttles.append(int(metadata.throttle_time.total_seconds() * 1000))
            requests += 1
            before_s = seconds()
            response = await admin.call(ApiKey.METADATA, {"topics": []})
            assert not response.throttle_time.total_seconds() and seconds() - before_s < QUICK_S
        assert throttles[0] == 0
        assert 0 < max(throttles) <= 1_000, "at most one window at a time"
        # 20 % of one core is 12 s in 60 s, and each request took 100 ms or more; the burst comes on top.
        assert requests <= (60 + BURST_S) * 0.2 / 0.1 + 1

    with QuotaWorld() as world:
        world.run(story(world))
        assert world.broker.metrics.throttled_requests["request"] > 10


# -- controller mutations ----------------------------------------------------------------------------------------------


def test_new_clients_are_refused_over_the_mutation_quota_and_old_ones_throttled() -> None:
    with QuotaWorld() as world:
        world.run(mutation_story(world))
        assert world.broker.metrics.throttled_requests["controller_mutation"] >= 4


async def mutation_story(world: QuotaWorld) -> None:
    client, old = await Client.open("new"), await Client.open("old")
    await client.set_quotas({"user": None, "client-id": None}, controller_mutation_rate=1)
    assert world.broker.server.quotas is None, "requests that change no partition are not looked at"
    # The bucket holds 11 tokens. A request is accepted unless there is a debt, and may leave one.
    first = await client.create_topic("a", 10)
    assert (first.topics[0].error_code, first.throttle_time.total_seconds()) == (ErrorCode.none, 0)
    assert (await client.create_topic("b", 10)).topics[0].error_code is ErrorCode.none
    seconds = elapsed(world)
    refused = await client.create_topic("c", 1)
    assert refused.topics[0].error_code is ErrorCode.throttling_quota_exceeded
    throttle_s = refused.throttle_time.total_seconds()
    assert 7 < throttle_s <= 9 and seconds() < QUICK_S
    assert "c" not in world.broker.image.topics
    # Other connections of the same client are refused as well, the one that was answered is muted.
    again = await Client.open("new")
    assert (await again.delete_topic("a")).responses[0].error_code is ErrorCode.throttling_quota_exceeded
    third = await Client.open("new")
    assert (await third.create_partitions("a", 12)).results[0].error_code is ErrorCode.throttling_quota_exceeded
    assert seconds() < 2 * QUICK_S
    assert (await client.create_topic("c", 1)).topics[0].error_code is ErrorCode.none
    assert throttle_s - QUICK_S < seconds() < throttle_s + QUICK_S
    # A client that does not know the error is throttled, and its request is carried out.
    assert (await old.create_topic("d", 20, at_most=5)).throttle_time.total_seconds() > 5
    seconds = elapsed(world)
    assert (await old.create_topic("e", 1, at_most=5)).topics[0].error_code is ErrorCode.none
    assert seconds() > 5
    assert {"d", "e"} <= world.broker.image.topics.keys()


def test_topics_that_metadata_requests_create_are_charged_to_the_mutation_quota() -> None:
    async def story(world: QuotaWorld) -> None:
        client, other = await Client.open("limited"), await Client.open("free")
        await client.set_quotas({"client-id": "limited"}, controller_mutation_rate=1)

        async def created(client: Client, name: str) -> ErrorCode:
            answer = await client.call(ApiKey.METADATA, {"topics": [{"name": name}], "allow_auto_topic_creation": True})
            code: ErrorCode = answer.topics[0].error_code
            return code

        seconds = elapsed(world)
        codes = [await created(client, f"auto-{number}") for number in range(40)]
        assert set(codes) == {ErrorCode.none, ErrorCode.leader_not_available}
        made = codes.count(ErrorCode.none)
        # The bucket holds 11 tokens, and the last topic may leave a debt.
        assert 11 <= made <= 12 + seconds()
        assert len(world.broker.image.topics) == made
        assert await created(client, "auto-0") is ErrorCode.none, "an existing topic is described, not created"
        assert await created(other, "another") is ErrorCode.none
        await asyncio.sleep(3)
        assert await created(client, "later") is ErrorCode.none

    with QuotaWorld() as world:
        world.run(story(world))
        assert world.broker.metrics.throttled_requests["controller_mutation"] > 20


# -- connections -------------------------------------------------------------------------------------------------------


def test_an_address_cannot_have_more_connections_than_it_is_allowed() -> None:
    async def story() -> None:
        first, second = await Client.open(), await Client.open()
        with pytest.raises(ClientError):
            await Client.open()
        first.close()
        await asyncio.sleep(QUICK_S)
        third = await Client.open()
        await third.call(ApiKey.METADATA, {"topics": []})
        await second.call(ApiKey.METADATA, {"topics": []})

    async def other() -> None:
        for _ in range(4):
            await Client.open()

    with QuotaWorld(connections_max_per_ip=2, connections_max_per_ip_overrides={"10.0.0.2": 4}) as world:
        world.run(story())
        assert world.broker.metrics.connections_refused == 1
        world.run(other(), machine=1)
        assert world.broker.metrics.connections_refused == 1


def test_the_limit_of_connections_of_an_address_can_change_while_the_node_runs() -> None:
    async def story(world: QuotaWorld) -> None:
        client = await Client.open()
        configs = [{"name": "max.connections.per.ip", "config_operation": 0, "value": "1"}]
        resource = {"resource_type": 4, "resource_name": "", "configs": configs}
        values = {"resources": [resource], "validate_only": False}
        assert (await client.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, values)).responses[0].error_code is ErrorCode.none
        with pytest.raises(ClientError):
            await Client.open()

    with QuotaWorld() as world:
        world.run(story(world))


def test_an_address_over_its_connection_rate_is_closed_late_and_not_served() -> None:
    async def story(world: QuotaWorld) -> None:
        admin = await Client.open("admin")
        assert (await admin.set_quotas({"ip": "10.0.0.1"}, connection_creation_rate=1)).error_code is ErrorCode.none
        kept = [await Client.open() for _ in range(10)]
        seconds = elapsed(world)
        with pytest.raises(ClientError):
            await Client.open()
        assert 0.05 < seconds() <= 1 + QUICK_S
        assert all(not client.connection.is_closed for client in kept)
        await asyncio.sleep(12)
        await Client.open()

    async def other() -> None:
        for _ in range(20):
            await Client.open()

    with QuotaWorld() as world:
        world.run(story(world))
        assert world.broker.metrics.throttled_requests["ip"] == 1
        world.run(other(), machine=1)


def test_only_a_bounded_number_of_connections_waits_for_a_late_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_quotas, "LATE_CLOSES_MAX", 3)

    async def story(world: QuotaWorld) -> None:
        admin = await Client.open("admin")
        await admin.set_quotas({"ip": None}, connection_creation_rate=0)
        seconds = elapsed(world)
        ended: list[float] = []

        async def refused() -> None:
            with pytest.raises(ClientError):
                await Client.open()
            ended.append(seconds())

        await asyncio.gather(*(refused() for _ in range(5)))
        assert sorted(at_s > QUICK_S for at_s in ended) == [False, False, True, True, True]
        assert len(world.broker.server._connections) == 1

    with QuotaWorld() as world:
        world.run(story(world))
        assert world.broker.metrics.connections_refused == 2


def test_connections_over_the_nodes_rate_are_served_late_at_that_rate() -> None:
    async def story(world: QuotaWorld) -> None:
        burst = [await Client.open() for _ in range(22)]
        seconds = elapsed(world)
        await asyncio.gather(*(Client.open() for _ in range(10)))
        assert 4 < seconds() < 6, "two per second"
        assert all(not client.connection.is_closed for client in burst)

    with QuotaWorld(connection_creation_rate=2) as world:
        world.run(story(world))
        assert world.broker.metrics.throttled_requests["connection"] >= 9


def test_a_connection_that_would_wait_too_long_is_refused() -> None:
    async def story() -> list[Connection | BaseException]:
        opens = (Connection.open(NODE_ADDRESS, PORT, client_id="app", timeout_s=100) for _ in range(60))
        return await asyncio.gather(*opens, return_exceptions=True)

    with QuotaWorld(connection_creation_rate=1) as world:
        outcomes = world.run(story())
        served = [outcome for outcome in outcomes if isinstance(outcome, Connection)]
        assert 40 <= len(served) <= 44, "11 at once, then one per second for 30 s"
        assert world.broker.metrics.connections_refused == 60 - len(served)
