"""AlterReplicaLogDirs (key 34), versions 1-2.

Behaviour
- A node has one log folder, so no replica can be moved to another one: LOG_DIR_NOT_FOUND for every other path.
- The node's own folder (DescribeLogDirs names it) succeeds without an effect for a replica that the node has, as in
  Kafka; REPLICA_NOT_AVAILABLE for any other replica.
Versions: 2 flexible.
Not supported: several log folders.
"""

from collections.abc import Callable

from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(runtime: Runtime, host: PartitionHost, request: Request) -> Values:
    def outcome(path: str, topic: str, index: int) -> ErrorCode:
        if path != runtime.config.data_folder:
            return ErrorCode.log_dir_not_found
        return ErrorCode.none if host.partitions.get((topic, index)) else ErrorCode.replica_not_available

    return _results(request, outcome)


def _results(request: Request, outcome: Callable[[str, str, int], ErrorCode]) -> Values:
    return {
        "results": [
            {
                "topic_name": topic.name,
                "partitions": [
                    {"partition_index": index, "error_code": outcome(folder.path, topic.name, index)}
                    for index in topic.partitions
                ],
            }
            for folder in request.message.dirs
            for topic in folder.topics
        ]
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return _results(request, lambda path, topic, index: code)


API = Api(ApiKey.ALTER_REPLICA_LOG_DIRS, (1, 2), on_error=on_error)
