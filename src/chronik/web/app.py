"""The HTTP application of one node: /healthz (alive), /readyz (serving), /metrics (Prometheus), /api/... (JSON).

Every node answers /api from its own metadata image, so a node that is cut off tells what it last knew; `version` in
/api/cluster shows how new that is.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from chronik.metadata.image import ClusterImage
from chronik.observe.metrics import Metrics, render
from chronik.web.views import ViewedNode, cluster_view, topic_view, topics_view

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServedNode(ViewedNode, Protocol):
    """What the application needs of a node."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def is_ready(self) -> bool: ...


def create_app(node: ServedNode) -> Starlette:
    """The application for one node; it runs on the node's loop and reads the node's state there."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(request: Request) -> Response:
        if node.is_ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not serving: starting, stopping or cut off from the controller\n", status_code=503)

    async def metrics(request: Request) -> Response:
        # Prometheus' library is imported, and the text is put together, off the loop: both would hold up requests.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, _import_prometheus)
        families = list(node.metrics.collect())
        text = await loop.run_in_executor(None, render, families)
        return Response(text, headers={"content-type": METRICS_CONTENT_TYPE})

    async def cluster(request: Request) -> Response:
        image = _image(node)
        if image is None:
            return _json({"error": "this node has no metadata yet: it is starting"}, 503)
        # Thousands of partitions take their time to count, and an image never changes: off the loop.
        work = asyncio.get_running_loop().run_in_executor(None, cluster_view, node.node_id, image, node.controller_id)
        return _json(await work)

    async def topics(request: Request) -> Response:
        image = _image(node)
        if image is None:
            return _json({"error": "this node has no metadata yet: it is starting"}, 503)
        return _json(await asyncio.get_running_loop().run_in_executor(None, topics_view, image))

    async def topic(request: Request) -> Response:
        image = _image(node)
        name = request.path_params["name"]
        found = None if image is None else image.topic(name)
        if found is None:
            return _json({"error": f"topic {name} does not exist here: see /api/topics"}, 404)
        if not node.is_ready:
            return _json({"error": "this node has not opened its logs yet: it is starting"}, 503)
        return _json(topic_view(node, found))

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/api/cluster", cluster),
            Route("/api/topics", topics),
            Route("/api/topics/{name}", topic),
        ]
    )


def _image(node: ServedNode) -> ClusterImage | None:
    """The node's image; None while it starts, which is when it has no metadata to ask."""
    try:
        return node.image
    except AttributeError:
        return None


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _import_prometheus() -> None:
    import prometheus_client.core  # noqa: F401
