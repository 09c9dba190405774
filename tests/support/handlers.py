"""The API handlers of a partial node in a test."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from chronik.node.api_table import ApiServices, make_handlers
from chronik.node.serving.api import Handler


def handlers_of(fake: Any) -> dict[int, Handler]:
    """Return handlers by API key. `fake` has services as attributes, and replaces those that it lacks."""
    services = {field.name: getattr(fake, field.name, fake) for field in fields(ApiServices)}
    return {int(handler.api.key): handler for handler in make_handlers(ApiServices(**services))}
