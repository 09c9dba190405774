"""AlterConfigs (key 33), versions 0-2.

Behaviour
- Replaces all configs of a topic or of this broker: a config that is not named returns to its default.
- Each resource has its own outcome, and is changed as a whole or not at all. A resource that appears twice in the
  request is INVALID_REQUEST.
- validate_only returns the same response and changes nothing.
Versions: 2 flexible.
Not supported: loggers, groups and client metrics (INVALID_REQUEST).
"""

from __future__ import annotations

from functools import partial

from chronik.node.admin.config_changes import replace_all
from chronik.node.apis.incremental_alter_configs import Services, alter_resources, on_error
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey


async def handle(node: Services, request: Request) -> Values:
    plans = [
        replace_all(
            resource.resource_type,
            resource.resource_name,
            [(config.name, config.value) for config in resource.configs],
            node.runtime.config,
        )
        for resource in request.message.resources
    ]
    return await alter_resources(node, request.message, plans)


API = Api(ApiKey.ALTER_CONFIGS, (0, 2), on_error=on_error, on_controller=True)


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
