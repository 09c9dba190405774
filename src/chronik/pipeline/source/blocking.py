"""Use the asyncio client from synchronous code: Spark's workers and planners have no event loop.

Each cluster has its own loop, which runs only during a call. Failures become PipelineErrors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar

from chronik.client.cluster import Cluster
from chronik.client.endpoint import EndpointError
from chronik.client.errors import RETRIABLE, ClientError, LostAtFirstRequest, SecurityError
from chronik.client.groups import Groups
from chronik.client.layout import TopicLayout
from chronik.client.properties import ClientSettings, Target
from chronik.client.topics import Topics
from chronik.pipeline.errors import PipelineError, Unavailable
from chronik.pipeline.source.ranges import Partition
from chronik.wire.errors import ErrorCode, KafkaError

_T = TypeVar("_T")

CLIENT_ID = "chronik-pipeline"
TIMEOUT_S = 30.0


class BlockingCluster:
    """A client for one cluster, used from one thread. Close it to close its sockets."""

    def __init__(self, target: Target) -> None:
        settings = ClientSettings.of(target)
        self.bootstrap = settings.bootstrap
        try:
            addresses = settings.endpoints
        except EndpointError as error:
            raise PipelineError(f"the brokers' addresses: {error}") from None
        self.loop = asyncio.new_event_loop()
        self.cluster = Cluster(addresses, client_id=CLIENT_ID, timeout_s=TIMEOUT_S, security=settings.security)

    def __enter__(self) -> BlockingCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is still pending, and close the connections."""
        if not self.loop.is_closed():
            self.loop.run_until_complete(self._close())
            self.loop.close()

    async def _close(self) -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await self.cluster.close()

    def run(self, work: Awaitable[_T]) -> _T:
        """Wait for the result. Raises PipelineError if the brokers do not answer, or refuse."""
        try:
            return self.loop.run_until_complete(work)
        except (SecurityError, LostAtFirstRequest) as error:
            raise PipelineError(str(error)) from None
        except ClientError as error:
            raise Unavailable(f"no answer from {self.bootstrap}: {error}; is the broker running there?") from None
        except KafkaError as error:
            if error.code == ErrorCode.unknown_topic_or_partition:
                raise PipelineError(f"{error.message}: the cluster at {self.bootstrap} has no such topic") from None
            kind = Unavailable if error.code in RETRIABLE else PipelineError
            raise kind(f"the cluster at {self.bootstrap} refused: {error}") from None

    def topics(self, names: Iterable[str] | None) -> dict[str, TopicLayout]:
        """Return those of the named topics that exist, or all topics of the cluster if None."""
        layout = self.run(self.cluster.layout(None if names is None else list(names)))
        return {
            name: topic
            for name, topic in layout.topics.items()
            if topic.error != ErrorCode.unknown_topic_or_partition and topic.partitions
        }

    def require_topics(self, names: Iterable[str]) -> dict[str, TopicLayout]:
        """Return the named topics. Raises PipelineError if one of them does not exist."""
        requested = list(names)
        topics = self.topics(requested)
        for name in requested:
            if name not in topics:
                raise PipelineError(f"topic {name} does not exist at {self.bootstrap}: create it, or check its name")
        return topics

    def offsets(
        self, partitions: Iterable[Partition], timestamp_ms: int, *, committed_only: bool = False
    ) -> dict[Partition, int]:
        """Return the ListOffsets result of each partition: -1 if `timestamp_ms` is a time after its last record."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        offsets: dict[Partition, int] = {}
        topics, level = Topics(self.cluster), int(committed_only)
        for topic, numbers in by_topic.items():
            listed = self.run(topics.offsets(topic, timestamp_ms, numbers, isolation_level=level))
            offsets |= {(topic, partition): answer.offset for partition, answer in listed.items()}
        return offsets

    def commit(self, group: str, offsets: Mapping[Partition, int]) -> None:
        self.run(Groups(self.cluster).commit(group, offsets))


def topic_id(topic: TopicLayout) -> str:
    """Return the topic's id as text; empty if the brokers have none."""
    return "" if topic.id is None or topic.id.int == 0 else str(topic.id)
