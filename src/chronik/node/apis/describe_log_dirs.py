"""DescribeLogDirs (key 35), versions 1-4.

Behaviour
- A node has one log folder. A partition's size is that of its segments; null topics means all topics.
- A topic or partition that this node does not host is omitted, as in Kafka.
Versions: 2 flexible, 3 top-level error code, 4 free and total space of the folder's disk.
Not supported: moving between folders (there is only one).
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple

from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    runtime: Runtime
    metadata: MetadataLog
    host: PartitionHost


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    image = node.metadata.image
    if message.topics is None:
        asked = [(topic.name, range(len(topic.partitions))) for topic in image.topics.values()]
    else:
        asked = [(topic.topic, topic.partitions) for topic in message.topics]
    topics = [{"name": name, "partitions": _partitions(node, name, indexes)} for name, indexes in asked]
    folder = os.path.abspath(node.runtime.config.data_folder)
    space = await node.runtime.run_blocking(lambda: node.runtime.env.disk.space(folder))
    return {
        "error_code": ErrorCode.none,
        "results": [
            {
                "error_code": ErrorCode.none,
                "log_dir": folder,
                "topics": [topic for topic in topics if topic["partitions"]],
                "total_bytes": space.total_bytes,
                "usable_bytes": space.free_bytes,
            }
        ],
    }


def _partitions(node: Services, topic: str, indexes: Any) -> list[Values]:
    hosted = [node.host.partitions.get((topic, index)) for index in indexes]
    return [
        {
            "partition_index": partition.index,
            "partition_size": partition.log.size_bytes,
            "offset_lag": max(partition.high_watermark - partition.log_end_offset, 0),
            "is_future_key": False,
        }
        for partition in hosted
        if partition is not None
    ]


API = Api(ApiKey.DESCRIBE_LOG_DIRS, (1, 4))


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
