"""The HTTP application of one node: /healthz (alive), /readyz (serving), /metrics (Prometheus), /api/... (JSON).

Every node answers /api/cluster and /api/topics from its own metadata image, so a node that is cut off tells what it
last knew; `version` in /api/cluster shows how new that is. What lies in a partition's log is asked of its leader.
"""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from chronik.observe.metrics import render
from chronik.web import batches
from chronik.web.answers import Parameters, Refusal, encoded_answer, json_answer, refused
from chronik.web.served import ServedNode, require_image, require_topic
from chronik.web.views import cluster_view, topic_view, topics_view

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
        Parameters(request, ())
        # Thousands of partitions take their time to count, and an image never changes: off the loop.
        image = require_image(node)
        work = asyncio.get_running_loop().run_in_executor(None, cluster_view, node.node_id, image, node.controller_id)
        return json_answer(await work)

    async def topics(request: Request) -> Response:
        Parameters(request, ())
        return json_answer(await asyncio.get_running_loop().run_in_executor(None, topics_view, require_image(node)))

    async def topic(request: Request) -> Response:
        Parameters(request, ())
        return json_answer(topic_view(node, require_topic(node, request.path_params["name"])))

    async def topic_batches(request: Request) -> Response:
        parameters = Parameters(request, batches.PARAMETERS)
        found = require_topic(node, request.path_params["name"])
        return encoded_answer(await batches.batches_page(node, found, parameters))

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/api/cluster", cluster),
            Route("/api/topics", topics),
            Route("/api/topics/{name}", topic),
            Route("/api/topics/{name}/batches", topic_batches),
        ],
        exception_handlers={Refusal: refused},
    )


def _import_prometheus() -> None:
    import prometheus_client.core  # noqa: F401
