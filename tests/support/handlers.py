"""The API handlers of a partial node in a test."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from chronik.node.api_table import ApiServices, make_handlers
from chronik.node.serving.api import Handler, Request


class Unlimited:
    """The quotas of a node that has none."""

    def mutations(self, request: Request, strict_from: int) -> None:
        return None


def handlers_of(fake: Any) -> dict[int, Handler]:
    """Return handlers by API key. `fake` has services as attributes, and replaces those that it lacks."""
    services = {field.name: getattr(fake, field.name, fake) for field in fields(ApiServices)}
    if services["quotas"] is fake:
        services["quotas"] = Unlimited()
    return {int(handler.api.key): handler for handler in make_handlers(ApiServices(**services))}
