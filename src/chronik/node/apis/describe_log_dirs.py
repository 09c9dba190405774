"""DescribeLogDirs (key 35), versions 1-4.

Behaviour
- A node has one log folder. A partition's size is that of its segments; null topics means all topics.
- A topic or partition that this node does not host is omitted, as in Kafka.
Versions: 2 flexible, 3 top-level error code, 4 free and total space of the folder's disk.
Not supported: moving between folders (there is only one).
"""

import os
from typing import Any

from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(runtime: Runtime, metadata: MetadataLog, host: PartitionHost, request: Request) -> Values:
    requested = request.message.topics
    if requested is None:
        topics = [(topic.name, range(len(topic.partitions))) for topic in metadata.image.topics.values()]
    else:
        topics = [(topic.topic, topic.partitions) for topic in requested]
    described = [{"name": name, "partitions": _partitions(host, name, indexes)} for name, indexes in topics]
    folder = os.path.abspath(runtime.config.data_folder)
    space = await runtime.run_blocking(lambda: runtime.env.disk.space(folder))
    return {
        "error_code": ErrorCode.none,
        "results": [
            {
                "error_code": ErrorCode.none,
                "log_dir": folder,
                "topics": [topic for topic in described if topic["partitions"]],
                "total_bytes": space.total_bytes,
                "usable_bytes": space.free_bytes,
            }
        ],
    }


def _partitions(host: PartitionHost, topic: str, indexes: Any) -> list[Values]:
    hosted = [host.partitions.get((topic, index)) for index in indexes]
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
