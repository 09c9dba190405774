"""Admin calls on topics: create, describe, alter, delete, configs and offsets.

Plain Kafka protocol, so all of it works on any Kafka cluster. A retry after a lost response may find its work done:
create then raises TOPIC_ALREADY_EXISTS, delete raises UNKNOWN_TOPIC_OR_PARTITION.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.client.errors import raise_for
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

LATEST = -1
EARLIEST = -2
CONSUMER_READER = -1
LOG_END_READER = -2
"""The replica id of a debugging consumer in ListOffsets: `latest` is then the log end, not the high watermark."""
READ_UNCOMMITTED, READ_COMMITTED = 0, 1
TOPIC_RESOURCE = 2
SET_CONFIG, DELETE_CONFIG = 0, 1
DYNAMIC_TOPIC_CONFIG = 1

_UNKNOWN_TOPIC = frozenset({ErrorCode.unknown_topic_or_partition})


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One topic config; `is_default` if it is not set on the topic itself."""

    name: str
    value: str | None
    is_default: bool


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """A ListOffsets result: offset -1 if no record is that recent; leader epoch -1 if the broker reports none."""

    offset: int
    timestamp_ms: int
    leader_epoch: int = -1


class Topics:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def create(
        self, name: str, partitions: int, replication_factor: int | None, configs: Mapping[str, str]
    ) -> None:
        """Create a topic. The default replication factor is the number of brokers, at most three."""
        if replication_factor is None:
            replication_factor = min(3, len((await self._cluster.layout([])).brokers))
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": replication_factor,
            "configs": [{"name": key, "value": value} for key, value in configs.items()],
        }

        def check(response: Any) -> None:
            raise_for(response.topics[0], f"topic {name}")

        await self._cluster.call(ApiKey.CREATE_TOPICS, {"topics": [topic]}, check, with_timeout=True)

    async def delete(self, name: str) -> None:
        values = {"topics": [{"name": name}], "topic_names": [name]}
        await self._change(ApiKey.DELETE_TOPICS, values, "responses", name)

    async def grow(self, name: str, partitions: int) -> None:
        """Raise the number of partitions to `partitions`."""
        topic = {"name": name, "count": partitions, "assignments": None}
        await self._change(ApiKey.CREATE_PARTITIONS, {"topics": [topic]}, "results", name)

    async def alter_configs(self, name: str, configs: Mapping[str, str | None]) -> None:
        """Set the given configs and keep all others; None resets a config to its default."""
        changes = [
            {"name": key, "config_operation": DELETE_CONFIG if value is None else SET_CONFIG, "value": value}
            for key, value in configs.items()
        ]
        resource = {"resource_type": TOPIC_RESOURCE, "resource_name": name, "configs": changes}
        key = ApiKey.INCREMENTAL_ALTER_CONFIGS
        await self._change(key, {"resources": [resource]}, "responses", name, with_timeout=False)

    async def _change(
        self, key: ApiKey, values: Mapping[str, Any], results: str, name: str, *, with_timeout: bool = True
    ) -> None:
        """Change one existing topic; `results` is the response's field with its result."""

        def check(response: Any) -> None:
            raise_for(getattr(response, results)[0], f"topic {name}")

        await self._cluster.call(key, values, check, with_timeout=with_timeout, give_up_on=_UNKNOWN_TOPIC)

    async def configs(self, name: str) -> list[ConfigEntry]:
        async def attempt(deadline: Deadline) -> list[ConfigEntry]:
            connection = await self._cluster.any_connection(deadline)
            resource = {"resource_type": TOPIC_RESOURCE, "resource_name": name, "configuration_keys": None}
            values = {"resources": [resource]}
            response = await connection.call(ApiKey.DESCRIBE_CONFIGS, values, timeout_s=deadline.left_s)
            result = response.results[0]
            raise_for(result, f"topic {name}")
            return [
                ConfigEntry(entry.name, entry.value, entry.config_source != DYNAMIC_TOPIC_CONFIG)
                for entry in sorted(result.configs, key=lambda entry: str(entry.name))
            ]

        return await self._cluster.retry(attempt, give_up_on=_UNKNOWN_TOPIC)

    async def offsets(
        self,
        name: str,
        timestamp_ms: int,
        partitions: Iterable[int] | None = None,
        *,
        reader: int = CONSUMER_READER,
        isolation_level: int = READ_UNCOMMITTED,
    ) -> dict[int, ListedOffset]:
        """List offsets at each partition's leader: LATEST, EARLIEST, or the first record at or after a time."""
        requested = None if partitions is None else frozenset(partitions)
        done: dict[int, ListedOffset] = {}

        async def attempt(deadline: Deadline) -> dict[int, ListedOffset]:
            leaders = await self._cluster.leaders(name, requested, deadline=deadline)
            missing: dict[int, list[int]] = {}
            for partition, leader in leaders.items():
                if partition not in done:
                    missing.setdefault(leader, []).append(partition)
            for leader, led in missing.items():
                connection = await self._cluster.connection(leader, deadline)
                done.update(
                    await list_offsets(connection, name, led, timestamp_ms, reader, isolation_level, deadline.left_s)
                )
            return dict(sorted(done.items()))

        return await self._cluster.retry(attempt, give_up_on=_UNKNOWN_TOPIC)


async def list_offsets(
    connection: Connection,
    name: str,
    partitions: list[int],
    timestamp_ms: int,
    reader: int,
    isolation_level: int,
    timeout_s: float,
) -> dict[int, ListedOffset]:
    """List the offsets of some partitions at one broker."""
    requested = [{"partition_index": partition, "timestamp": timestamp_ms} for partition in partitions]
    topic = {"name": name, "partitions": requested}
    values = {"replica_id": reader, "isolation_level": isolation_level, "topics": [topic]}
    response = await connection.call(ApiKey.LIST_OFFSETS, values, timeout_s=timeout_s, at_most=9)
    results = response.topics[0].partitions
    for result in results:
        raise_for(result, f"offsets of {name}-{result.partition_index}")
    return {
        result.partition_index: ListedOffset(result.offset, result.timestamp, getattr(result, "leader_epoch", -1))
        for result in results
    }
