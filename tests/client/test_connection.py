"""One connection: versions, pipelining, deadlines, and brokers that misbehave."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tests.client.fake_broker import FakeBroker, metadata

from chronik.client.connection import Connection, ConnectionLimits
from chronik.client.errors import BadResponse, ConnectionLost, RequestTimedOut, Unreachable, UnsupportedByBroker
from chronik.wire.api import ApiKey
from chronik.wire.messages import write_request

EMPTY = {"topics": [], "allow_auto_topic_creation": False}


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(limited())


async def test_a_connection_uses_the_newest_version_that_both_sides_support() -> None:
    async with FakeBroker() as broker:
        broker.versions[ApiKey.METADATA] = (0, 9)
        connection = await Connection.open(*broker.address)
        assert connection.version(ApiKey.METADATA) == 9
        assert connection.version(ApiKey.METADATA, at_most=5) == 5
        with pytest.raises(UnsupportedByBroker):
            connection.version(ApiKey.DELETE_GROUPS)
        connection.close()


async def test_the_client_falls_back_to_api_versions_version_0() -> None:
    async with FakeBroker() as broker:
        broker.versions[ApiKey.API_VERSIONS] = (0, 2)
        connection = await Connection.open(*broker.address)
        assert connection.supports(ApiKey.METADATA, 12)
        connection.close()


async def test_pipelined_requests_each_receive_their_own_response() -> None:
    async with FakeBroker() as broker:
        broker.handlers[ApiKey.METADATA] = lambda request: metadata(
            broker, topics={request.topics[0].name: [1]} if request.topics else {}
        )
        connection = await Connection.open(*broker.address, limits=ConnectionLimits(in_flight_requests_max=3))
        calls = (
            connection.call(ApiKey.METADATA, {**EMPTY, "topics": [{"name": f"t{number}", "topic_id": None}]})
            for number in range(20)
        )
        answers = await asyncio.gather(*calls)
        assert [answer.topics[0].name for answer in answers] == [f"t{number}" for number in range(20)]
        connection.close()


async def test_requests_of_one_turn_leave_in_two_writes() -> None:
    async with FakeBroker() as broker:
        broker.handlers[ApiKey.METADATA] = lambda _: metadata(broker)
        connection = await Connection.open(*broker.address)
        sent = [0]
        transport = connection._transport
        assert transport is not None
        with pytest.MonkeyPatch.context() as patch:
            write = transport.write

            def counted(data: bytes) -> None:
                sent.append(len(data))
                write(data)

            patch.setattr(connection, "_transport", SimpleNamespace(write=counted, abort=transport.abort))
            body = write_request(ApiKey.METADATA, 9, EMPTY)
            answers = [connection.send(ApiKey.METADATA, 9, body) for _ in range(5)]
            assert len(sent) == 2  # the first one does not wait
            await asyncio.gather(*answers)
        assert sent[2:] == [4 * sent[1]]
        connection.close()


async def test_a_request_that_was_sent_just_before_the_close_is_not_lost() -> None:
    async with FakeBroker() as broker:
        received: list[str] = []

        def handle(request: Any) -> Mapping[str, Any]:
            received.append(request.topics[0].name)
            return metadata(broker)

        broker.handlers[ApiKey.METADATA] = handle
        connection = await Connection.open(*broker.address)
        for name in ("a", "b"):
            topics = {**EMPTY, "topics": [{"name": name, "topic_id": None}]}
            connection.send_unanswered(ApiKey.METADATA, 9, write_request(ApiKey.METADATA, 9, topics))
        connection.close()
        async with asyncio.timeout(10):
            while len(received) < 2:
                await asyncio.sleep(0.01)
        assert received == ["a", "b"]


async def test_a_response_larger_than_the_buffer_is_complete() -> None:
    async with FakeBroker() as broker:
        topics = {f"topic-{number:05}": [1, 1, 1] for number in range(2000)}
        broker.handlers[ApiKey.METADATA] = lambda request: metadata(broker, topics=topics)
        connection = await Connection.open(*broker.address, limits=ConnectionLimits(receive_buffer_bytes=512))
        for _ in range(3):
            answer = await connection.call(ApiKey.METADATA, EMPTY)
            assert [topic.name for topic in answer.topics] == list(topics)
        connection.close()


async def test_a_request_to_an_unresponsive_broker_times_out_at_its_deadline() -> None:
    async with FakeBroker({ApiKey.METADATA: lambda request: None}) as broker:
        connection = await Connection.open(*broker.address)
        other = asyncio.ensure_future(connection.call(ApiKey.METADATA, EMPTY))
        await asyncio.sleep(0)
        with pytest.raises(RequestTimedOut):
            await connection.call(ApiKey.METADATA, EMPTY, timeout_s=0.05)
        assert connection.is_closed
        with pytest.raises(ConnectionLost):
            await other


async def test_all_pending_requests_fail_when_the_broker_disconnects() -> None:
    async with FakeBroker({ApiKey.METADATA: lambda request: None}) as broker:
        connection = await Connection.open(*broker.address)
        calls = [asyncio.ensure_future(connection.call(ApiKey.METADATA, EMPTY)) for _ in range(5)]
        while broker.times_asked(ApiKey.METADATA) < 5:
            await asyncio.sleep(0)
        broker.hang_up()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, ConnectionLost) for result in results)
        with pytest.raises(ConnectionLost):
            await connection.call(ApiKey.METADATA, EMPTY)


async def test_a_malformed_response_raises_an_error() -> None:
    async with FakeBroker({ApiKey.METADATA: lambda request: {}}) as broker:
        connection = await Connection.open(*broker.address)
        broker.raw_answer = b"\xff" * 11
        with pytest.raises(BadResponse):
            await connection.call(ApiKey.METADATA, EMPTY)
        connection.close()


async def test_a_server_that_does_not_speak_kafka_is_detected() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    with pytest.raises(ConnectionLost, match="does not speak Kafka"):
        await Connection.open(*server.sockets[0].getsockname())
    server.close()


async def test_a_closed_port_is_unreachable() -> None:
    async with FakeBroker() as broker:
        address = broker.address
    with pytest.raises(Unreachable, match="cannot connect to"):
        await Connection.open(*address)
