"""AlterConfigs (key 33), versions 0-2.

Behaviour
- Replaces all configs of a topic or of this broker: what is not named goes back to its default.
- Each resource has its own outcome; a resource is changed as a whole or not at all. One that stands twice in the
  request is INVALID_REQUEST.
- validate_only answers the same and changes nothing.
Versions: 2 flexible.
Not supported: loggers (INVALID_REQUEST; IncrementalAlterConfigs has them), groups and client metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronik.node.admin.config_changes import replace_all
from chronik.node.apis.incremental_alter_configs import alter_resources, on_error
from chronik.node.serving.request import Api, Request, Values
from chronik.wire.api import ApiKey

if TYPE_CHECKING:
    from chronik.node.broker import Broker


async def handle(broker: Broker, request: Request) -> Values:
    plans = [
        replace_all(
            resource.resource_type,
            resource.resource_name,
            [(config.name, config.value) for config in resource.configs],
            broker.config,
        )
        for resource in request.message.resources
    ]
    return await alter_resources(broker, request.message, plans)


API = Api(ApiKey.ALTER_CONFIGS, (0, 2), handle, on_error=on_error, on_controller=True)
