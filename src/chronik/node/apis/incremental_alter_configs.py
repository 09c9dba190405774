"""IncrementalAlterConfigs (key 44), versions 0-1.

Behaviour
- Sets, unsets, appends to or subtracts from single configs of a topic, of this broker, or of all brokers (the empty
  name). Only lists support append and subtract. An append to an unset list extends its default.
- Each resource has its own outcome, answered when the change is durable and in effect on this node. A resource is
  changed as a whole or not at all. A resource that appears twice in the request is INVALID_REQUEST.
- validate_only returns the same response and changes nothing.
Versions: 1 flexible.
Not supported: groups and client metrics, and loggers, whose levels are set when the node starts (INVALID_REQUEST).
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from chronik.node.admin.config_changes import Change, Planned, change_some
from chronik.node.admin.responses import duplicates, refuse_entries, within
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

WAIT = timedelta(seconds=30)
"""The request has no timeout of its own."""


async def handle(runtime: Runtime, metadata: MetadataLog, host: PartitionHost, request: Request) -> Values:
    plans = [
        change_some(
            resource.resource_type,
            resource.resource_name,
            [Change(config.name, config.config_operation, config.value) for config in resource.configs],
            runtime.config,
        )
        for resource in request.message.resources
    ]
    return await alter_resources(runtime, metadata, host, request.message, plans)


async def alter_resources(
    runtime: Runtime, metadata: MetadataLog, host: PartitionHost, message: Any, plans: Sequence[Planned]
) -> Values:
    """Run one plan for each resource of the request."""

    async def alter(plan: Planned, is_repeated: bool) -> Values:
        if is_repeated:
            raise KafkaError(ErrorCode.invalid_request, "Each resource must appear at most once.")
        if message.validate_only:
            plan(metadata.image)
        else:
            await metadata.propose(plan)
            await host.applied()
        return {}

    keys = [(resource.resource_type, resource.resource_name) for resource in message.resources]
    repeated = duplicates(keys)
    entries = [
        ({"resource_type": key[0], "resource_name": key[1]}, alter(plan, key in repeated))
        for key, plan in zip(keys, plans, strict=True)
    ]
    return {"responses": await within(runtime, WAIT, entries)}


refuse_resources = refuse_entries(
    "responses",
    lambda request: (
        {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
        for resource in request.message.resources
    ),
)
API = Api(ApiKey.INCREMENTAL_ALTER_CONFIGS, (0, 1), on_error=refuse_resources, on_controller=True)
