"""The API handlers of a node of which a test has only a part."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from chronik.node.api_table import ApiServices, make_handlers
from chronik.node.serving.api import Handler


def handlers_of(fake: Any) -> dict[int, Handler]:
    """Handlers by API key. `fake` has the services as attributes, and is itself those that it has not."""
    services = {field.name: getattr(fake, field.name, fake) for field in fields(ApiServices)}
    return {int(handler.api.key): handler for handler in make_handlers(ApiServices(**services))}
