"""An administrator who reassigns replicas and elects preferred leaders: this must not lose records."""

from __future__ import annotations

import asyncio
from functools import partial

from chronik.client.cluster import Deadline
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, SimClient
from chronik.testing.sim.history import History
from chronik.testing.sim.world import World
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

PREFERRED = 0
PAUSE_S = 0.5
SMALLER_SHARE = 0.2
NOT_NOW = (
    ErrorCode.election_not_needed,
    ErrorCode.preferred_leader_not_available,
    ErrorCode.eligible_leaders_not_available,
    ErrorCode.invalid_replica_assignment,
)
"""Errors that the current state of the cluster may cause."""


class SimMover(SimClient):
    """Changes the nodes, order and number of replicas, and elects preferred leaders. Restores the number at its end."""

    def __init__(
        self,
        name: str,
        world: World,
        history: History,
        bootstrap: list[tuple[str, int]],
        topic: str,
        partitions: int,
        nodes: int,
        replicas: int,
    ) -> None:
        super().__init__(name, world, history, bootstrap)
        self.moves = 0
        self._topic = topic
        self._partitions = partitions
        self._nodes = list(range(1, nodes + 1))
        self._replicas = replicas

    async def work(self) -> None:
        while not self.is_finishing:
            await asyncio.sleep(self.random.expovariate(1.0) * PAUSE_S)
            replicas = self.random.sample(self._nodes, self._replicas)
            if self.random.random() < SMALLER_SHARE:
                replicas.pop()
            if self.random.random() < 0.6:
                partition = self.random.randrange(self._partitions)
                await self.insist(partial(self._assign, partition, replicas))
            else:
                await self.insist(self._elect)
            self.moves += 1
        for partition in range(self._partitions):
            await self.insist(partial(self._assign, partition, self._nodes[: self._replicas]))

    async def _assign(self, partition: int, replicas: list[int]) -> None:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        connection = await self.cluster.any_connection(deadline)
        moved = {"partition_index": partition, "replicas": replicas}
        values = {
            "topics": [{"name": self._topic, "partitions": [moved]}],
            "timeout": 1000,
            "allow_replication_factor_change": True,
        }
        response = await connection.call(ApiKey.ALTER_PARTITION_REASSIGNMENTS, values, timeout_s=REQUEST_TIMEOUT_S)
        self._check(response.error_code, "assign")
        for topic in response.responses:
            for result in topic.partitions:
                self._check(result.error_code, f"assign {replicas}")

    async def _elect(self) -> None:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        connection = await self.cluster.any_connection(deadline)
        values = {"election_type": PREFERRED, "topic_partitions": None, "timeout": 1000}
        response = await connection.call(ApiKey.ELECT_LEADERS, values, timeout_s=REQUEST_TIMEOUT_S)
        self._check(getattr(response, "error_code", ErrorCode.none), "elect")

    def _check(self, error_code: ErrorCode, what: str) -> None:
        code = ErrorCode(error_code)
        if code is ErrorCode.none or (code in NOT_NOW and not self.is_finishing):
            return
        if code in NOT_NOW:
            raise KafkaError(ErrorCode.leader_not_available, f"{what}: {code.name}")
        raise KafkaError(code, what)
