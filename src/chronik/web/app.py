"""The HTTP application of one node. Nothing here changes the cluster.

/healthz (alive), /readyz (serving), /metrics (Prometheus), /api/... (JSON), /api/events (server-sent events),
/api/openapi.json (the API description) and / (the web page).

Every node answers /api/cluster and /api/topics from its own metadata image. A disconnected node thus returns the last
state it received; `version` in /api/cluster shows how recent that is. The contents of a partition's log come from its
leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from chronik.observe.metrics import render
from chronik.web import batches, diagnosis, messages, traces
from chronik.web.answers import Parameters, Refusal, encoded_answer, json_answer, not_here, refused
from chronik.web.asked_brokers import AskedBrokers
from chronik.web.events import EventHub
from chronik.web.group_views import group_view, groups_view
from chronik.web.node_view import NodeView, require_image, require_topic
from chronik.web.offsets import OffsetSampler
from chronik.web.page_files import page_routes
from chronik.web.safe_headers import SafeHeaders
from chronik.web.views import cluster_view, damages_view, topic_view, topics_view

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DESCRIPTION = Path(__file__).with_name("openapi.json")
"""The API description, maintained by hand. Tests check it against the routes; schemathesis checks the responses."""
ASKING_MAX = 4
"""How many requests may query every broker at the same time. Further requests wait."""


def create_app(node: NodeView) -> Starlette:
    """Return the application for one node. It runs on the node's event loop and reads the node's state there."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(request: Request) -> Response:
        if node.is_ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not serving: starting, stopping or cut off from the controller\n", status_code=503)

    async def metrics(request: Request) -> Response:
        # Import Prometheus' library and render the text off the event loop, because both would delay other requests.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, _import_prometheus)
        families = list(node.metrics.collect())
        text = await loop.run_in_executor(None, render, families)
        return Response(text, headers={"content-type": METRICS_CONTENT_TYPE})

    async def described(request: Request) -> Response:
        Parameters(request, ())
        return encoded_answer(description)

    async def cluster(request: Request) -> Response:
        Parameters(request, ())
        # Counting thousands of partitions takes time. The image is immutable, so this can run off the event loop.
        image, damages = require_image(node), damages_view(node)
        count = partial(cluster_view, node.node_id, image, node.controller_id, damages)
        return json_answer(await asyncio.get_running_loop().run_in_executor(None, count))

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

    async def topic_messages(request: Request) -> Response:
        parameters = Parameters(request, messages.PARAMETERS)
        found = require_topic(node, request.path_params["name"])
        return encoded_answer(await messages.messages_page(node, found, parameters))

    async def groups(request: Request) -> Response:
        Parameters(request, ())
        async with asking:
            return json_answer(await _asked(node, groups_view))

    async def group(request: Request) -> Response:
        Parameters(request, ())
        name = request.path_params["name"]
        async with asking:
            return json_answer(await _asked(node, partial(group_view, name)))

    async def ring(request: Request) -> Response:
        return encoded_answer(await traces.traces_page(node, Parameters(request, traces.PARAMETERS)))

    async def examine(request: Request) -> Response:
        parameters = Parameters(request, diagnosis.PARAMETERS)
        return json_answer(await doctor.examine(request.path_params["name"], parameters))

    async def event_stream(request: Request) -> Response:
        return hub.open(request)

    description = DESCRIPTION.read_bytes()
    hub = EventHub(node)
    doctor = diagnosis.Doctor(node)
    asking = asyncio.Semaphore(ASKING_MAX)
    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/api/openapi.json", described),
            Route("/api/cluster", cluster),
            Route("/api/topics", topics),
            Route("/api/topics/{name}", topic),
            Route("/api/topics/{name}/batches", topic_batches),
            Route("/api/topics/{name}/messages", topic_messages),
            Route("/api/groups", groups),
            Route("/api/groups/{name:path}", group),
            Route("/api/traces", ring),
            Route("/api/doctor/{name}", examine),
            Route("/api/events", event_stream),
            *page_routes(),
        ],
        exception_handlers={Refusal: refused, 404: not_here, 405: not_here},
        middleware=[Middleware(SafeHeaders)],
    )
    app.state.close = hub.close
    return app


async def _asked(
    node: NodeView, view: Callable[[NodeView, OffsetSampler, AskedBrokers], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Run a view that queries other brokers, over its own connections."""
    sampler, brokers = OffsetSampler(node), AskedBrokers()
    try:
        return await view(node, sampler, brokers)
    finally:
        await sampler.close()
        await brokers.close()


def _import_prometheus() -> None:
    import prometheus_client.core  # noqa: F401
