"""IncrementalAlterConfigs (key 44), versions 0-1.

Behaviour
- Sets, unsets, appends to or subtracts from single configs of a topic, of a group, of this broker, of all brokers (the
  empty name), or of a subscription to metrics of clients, which exists while it has a config. Only lists support append
  and subtract. An append to an unset list extends its default.
- Each resource has its own outcome, answered when the change is durable and in effect on this node. A resource is
  changed as a whole or not at all. A resource that appears twice in the request is INVALID_REQUEST.
- validate_only returns the same response and changes nothing.
- The levels of this broker's loggers change at once and until the node stops. Deleting one makes it follow `root`.
  A request with loggers and other resources is answered by the controller, which has loggers of its own only.
Versions: 1 flexible.
"""

from chronik.node.admin.configs import Change, alter_resources, has_only_loggers, refuse_resources
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
        lambda config: Change(config.name, config.config_operation, config.value),
        replaces_all=False,
    )


API = Api(
    ApiKey.INCREMENTAL_ALTER_CONFIGS, (0, 1), on_error=refuse_resources, on_controller=True, is_local=has_only_loggers
)
