"""AlterConfigs (key 33), versions 0-2.

Behaviour
- Replaces all configs of a topic, of a group, of this broker or of a subscription to metrics of clients: a config that
  is not named returns to its default.
- Each resource has its own outcome, and is changed as a whole or not at all. A resource that appears twice in the
  request is INVALID_REQUEST.
- validate_only returns the same response and changes nothing.
Versions: 2 flexible.
Not supported: loggers (INVALID_REQUEST).
"""

from chronik.node.admin.configs import Change, Operation, alter_resources, refuse_resources
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey


async def handle(runtime: Runtime, metadata: MetadataLog, host: PartitionHost, request: Request) -> Values:
    return await alter_resources(
        runtime,
        metadata,
        host,
        request,
        lambda config: Change(config.name, Operation.SET, config.value),
        replaces_all=True,
    )


API = Api(ApiKey.ALTER_CONFIGS, (0, 2), on_error=refuse_resources, on_controller=True)
