"""The description at /api/openapi.json matches the routes and the parameters of their handlers."""

from __future__ import annotations

import json
from typing import Any, cast

from starlette.routing import Route

from chronik.web import batches, diagnosis, events, messages, traces
from chronik.web.app import DESCRIPTION, create_app
from chronik.web.node_view import NodeView

DESCRIBED: dict[str, Any] = json.loads(DESCRIPTION.read_text())
PATHS: dict[str, Any] = DESCRIBED["paths"]


def routes() -> list[Route]:
    # The app does not use the node before the first request.
    return [route for route in create_app(cast(NodeView, None)).routes if isinstance(route, Route)]


def parameters(path: str) -> dict[str, Any]:
    return {each["name"]: each["schema"] for each in PATHS[path]["get"].get("parameters", ())}


def test_the_description_has_exactly_the_routes_of_the_api() -> None:
    pages = {"/", "/page/{name}"}
    served = {route.path.replace(":path}", "}") for route in routes()} - pages
    assert set(PATHS) == served
    assert all(set(PATHS[path]) <= {"get", "parameters"} for path in PATHS)
    assert all((route.methods or set()) == {"GET", "HEAD"} for route in routes())


def test_the_description_has_exactly_the_parameters_of_each_handler() -> None:
    known = {
        "/api/topics/{name}/batches": batches.PARAMETERS,
        "/api/topics/{name}/messages": messages.PARAMETERS,
        "/api/traces": traces.PARAMETERS,
        "/api/doctor/{name}": diagnosis.PARAMETERS,
        "/api/events": events.PARAMETERS,
    }
    for path in PATHS:
        assert set(parameters(path)) == set(known.get(path, ())), path


def test_the_description_has_the_bounds_of_the_handlers() -> None:
    def bounds(path: str, name: str) -> tuple[int, int, int]:
        schema = parameters(path)[name]
        return schema["minimum"], schema["maximum"], schema["default"]

    assert bounds("/api/topics/{name}/batches", "limit") == (1, batches.LIMIT_MAX, batches.LIMIT)
    assert bounds("/api/topics/{name}/messages", "limit") == (1, messages.LIMIT_MAX, messages.LIMIT)
    assert bounds("/api/traces", "limit") == (1, traces.LIMIT_MAX, traces.LIMIT)
    assert bounds("/api/doctor/{name}", "seconds") == (1, diagnosis.SECONDS_MAX, diagnosis.SECONDS)
