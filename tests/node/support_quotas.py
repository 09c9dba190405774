"""A real node on a simulated machine, so that seconds of throttling pass in virtual time; and clients that use it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from tests.sim.machines import Machines

from chronik.client.connection import Connection
from chronik.node.broker import Broker
from chronik.testing.sim.host import EPOCH_MS, Host
from chronik.testing.sim.node import SimNode, node_config
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    read_fetch_response,
    write_fetch_request,
)
from chronik.wire.produce import (
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    read_produce_response,
    write_produce_request,
)

T = TypeVar("T")
NODE_ADDRESS = "10.0.2.1"
PORT = 9092
PRODUCE_VERSION = 11
FETCH_VERSION = 12
START_S_MAX = 60.0
READY_S_MAX = 30.0
ANONYMOUS_USER = "ANONYMOUS"
TOPIC = "t"


class QuotaWorld:
    """One node, and two machines with clients. Use as a context manager; `run` runs a story in virtual time."""

    def __init__(self, **settings: Any) -> None:
        self.machines = Machines(seed=11, count=2)
        self.host = Host(self.machines.world, self.machines.network, "node", NODE_ADDRESS)
        self.node = SimNode(self.host, node_config(1, self.host, num_partitions=1, **settings))

    def __enter__(self) -> QuotaWorld:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.host.bury()
        self.machines.bury()

    def start(self) -> None:
        world = self.machines.world
        self.node.start()
        world.run(world.now + START_S_MAX, lambda: self.node.is_ready)
        assert self.node.is_ready, list(self.node.log_lines)

    def restart(self) -> None:
        self.node.kill()
        self.start()

    @property
    def broker(self) -> Broker:
        assert self.node.broker is not None
        return self.node.broker

    @property
    def now_s(self) -> float:
        return self.machines.world.now

    def run(self, story: Coroutine[Any, Any, T], machine: int = 0) -> T:
        return self.machines.run(story, machine)

    def logged(self, event: str) -> list[str]:
        return [line for line in self.node.log_lines if f'"{event}"' in line]


class Client:
    """One connection of a client with a name."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @classmethod
    async def open(cls, client_id: str = "app") -> Client:
        return cls(await Connection.open(NODE_ADDRESS, PORT, client_id=client_id, timeout_s=READY_S_MAX))

    def close(self) -> None:
        self.connection.close()

    async def call(self, key: ApiKey, values: Mapping[str, Any], at_most: int | None = None) -> Any:
        return await self.connection.call(key, values, at_most=at_most, timeout_s=1_000)

    async def create_topic(self, name: str = TOPIC, partitions: int = 1, at_most: int | None = None) -> Any:
        topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": [], "configs": []}
        values = {"topics": [topic], "timeout": 10_000, "validate_only": False}
        return await self.call(ApiKey.CREATE_TOPICS, values, at_most)

    async def delete_topic(self, name: str) -> Any:
        values = {"topics": [{"name": name, "topic_id": None}], "timeout": 10_000}
        return await self.call(ApiKey.DELETE_TOPICS, values)

    async def create_partitions(self, name: str, count: int) -> Any:
        values = {"topics": [{"name": name, "count": count, "assignments": None}], "timeout": 10_000}
        return await self.call(ApiKey.CREATE_PARTITIONS, values)

    async def set_quotas(self, parts: Mapping[str, str | None], **quotas: float | None) -> Any:
        """Set quotas of one entity (None: remove) and return the outcome's entry."""
        return (await self.alter((parts, quotas))).entries[0]

    async def alter(
        self, *entries: tuple[Mapping[str, str | None], Mapping[str, float | None]], validate_only: bool = False
    ) -> Any:
        altered = [
            {
                "entity": [{"entity_type": kind, "entity_name": name} for kind, name in parts.items()],
                "ops": [{"key": key, "value": value or 0.0, "remove": value is None} for key, value in quotas.items()],
            }
            for parts, quotas in entries
        ]
        return await self.call(ApiKey.ALTER_CLIENT_QUOTAS, {"entries": altered, "validate_only": validate_only})

    async def describe(self, *components: tuple[str, int, str | None], strict: bool = False) -> Any:
        values = [{"entity_type": kind, "match_type": how, "match": match} for kind, how, match in components]
        return await self.call(ApiKey.DESCRIBE_CLIENT_QUOTAS, {"components": values, "strict": strict})

    def send_produce(self, size_bytes: int, acks: int = 1) -> asyncio.Future[memoryview]:
        return self.connection.send(ApiKey.PRODUCE, PRODUCE_VERSION, produce_request(size_bytes, acks))

    async def produce(self, size_bytes: int) -> ProduceResponse:
        response = read_produce_response(PRODUCE_VERSION, await self.send_produce(size_bytes))
        assert response.topics[0][2][0].error_code == 0, response
        return response

    async def fetch(
        self, offset: int = 0, *, session: tuple[int, int] = (0, -1), max_wait_ms: int = 0, max_bytes: int = 1 << 20
    ) -> FetchResponse:
        topic = FetchTopic(TOPIC, None, [FetchPartition(0, -1, offset, -1, -1, max_bytes)])
        request = FetchRequest(
            topics=[topic], max_wait_ms=max_wait_ms, min_bytes=1, session_id=session[0], session_epoch=session[1]
        )
        body = await self.connection.request(
            ApiKey.FETCH, FETCH_VERSION, write_fetch_request(FETCH_VERSION, request), timeout_s=1_000
        )
        return read_fetch_response(FETCH_VERSION, body)


def produce_request(size_bytes: int, acks: int = 1) -> bytes:
    batch = encode_batch([(None, b"x" * size_bytes, [], EPOCH_MS)])
    topic = ProduceTopic(TOPIC, None, [(0, memoryview(batch))])
    return write_produce_request(PRODUCE_VERSION, ProduceRequest(None, acks, 5_000, [topic]))


def fetched_bytes(response: FetchResponse) -> int:
    return sum(len(partition.records) for _, _, partitions in response.topics for partition in partitions)
