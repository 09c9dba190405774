"""The HTTP application of one node. Nothing here changes the cluster but the schema registry (see `registry`).

With `security.http_login`, everything but the log-in form needs a log-in, and shows what the user may see: see `guard`
and `rights`.

/healthz (alive), /readyz (serving), /metrics (Prometheus), /api/... (JSON), /api/events (server-sent events),
/api/openapi.json (the API description) and / (the web page).

Every node answers /api/cluster and /api/topics from its own metadata image. A disconnected node thus returns the last
state it received; `version` in /api/cluster shows how recent that is. The contents of a partition's log come from its
leader.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from chronik.doctor import Diagnosis
from chronik.observe.metrics import render
from chronik.web import batches, doctor, events, messages, schemas, traces
from chronik.web.answers import Parameters, Refusal, json_answer, not_here, refused
from chronik.web.client_metrics import client_metrics_view
from chronik.web.events import EventHub
from chronik.web.group_views import group_view, groups_view
from chronik.web.guard import EVERYONE, TOKEN_SECONDS, Guard
from chronik.web.known_answers import KnownAnswers, view_of
from chronik.web.node_view import REASONS, NodeView, require_image, require_topic
from chronik.web.offsets import OffsetSampler
from chronik.web.openapi import PLAIN_TEXT, Endpoint, describe
from chronik.web.pipelines import require_pipelines
from chronik.web.registry import RegistryRoute
from chronik.web.rights import (
    require_cluster,
    require_visible_group,
    require_visible_topic,
    visible_configs,
    visible_group,
    visible_groups,
    visible_shares,
    visible_topics,
    visible_transactions,
)
from chronik.web.safe_headers import SafeHeaders
from chronik.web.transaction_views import transactions_view
from chronik.web.views import cluster_scope, cluster_view, own_view, topic_view, topics_by_name, topics_view

T = TypeVar("T")

SAMPLING_MAX = 4
"""How many requests may query every broker at the same time. Further requests wait."""
PAGE_FOLDER = Path(__file__).parent / "page"
LOGIN_FILE = "login.html"
PUBLIC_FILES = (LOGIN_FILE, "login.js", "style.css", "icon.svg")
"""What the log-in form needs. They are the same for every cluster."""
LOGIN_SCHEMA = {
    "type": "object",
    "properties": {"user": {"type": "string"}, "password": {"type": "string"}},
    "required": ["user", "password"],
    "additionalProperties": False,
}
PAGE_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def create_app(node: NodeView) -> Starlette:
    """Return the application for one node. It runs on the node's event loop and reads the node's state there."""
    guard = Guard(node)
    hub = EventHub(node, guard)
    app = Starlette(
        routes=[
            RegistryRoute(node, guard),
            *(_route(endpoint, guard) for endpoint in _endpoints(node, hub, guard)),
            *_page_routes(guard),
        ],
        exception_handlers={Refusal: refused, 404: not_here, 405: not_here},
        middleware=[Middleware(SafeHeaders, node)],
    )
    app.state.close = hub.close
    app.state.known = KnownAnswers(partial(view_of, node))
    return app


def _route(endpoint: Endpoint, guard: Guard) -> Route:
    async def respond(request: Request) -> Response:
        visitor = await guard.admit(request, endpoint.need)
        answer = await endpoint.handle(Parameters(request, endpoint.parameters, visitor))
        response = answer if isinstance(answer, Response) else json_answer(answer)
        guard.renew(request, visitor, response)
        return response

    return Route(endpoint.path, respond, methods=[endpoint.method])


def _endpoints(node: NodeView, hub: EventHub, guard: Guard) -> list[Endpoint]:
    sampling = asyncio.Semaphore(SAMPLING_MAX)

    async def healthz(parameters: Parameters) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(parameters: Parameters) -> Response:
        if node.is_ready:
            return PlainTextResponse("ready\n")
        reasons = (REASONS.get(node.state), node.disk_error)
        reason = "; ".join(reason for reason in reasons if reason is not None)
        return PlainTextResponse(f"not serving: {reason}\n", status_code=503)

    async def metrics(parameters: Parameters) -> Response:
        require_cluster(parameters.access, "the metrics")
        # Import Prometheus' library and render the text off the event loop, because both would delay other requests.
        await asyncio.to_thread(import_module, "prometheus_client.core")
        text = await asyncio.to_thread(render, list(node.metrics.collect()))
        return Response(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def description(parameters: Parameters) -> schemas.OpenApi:
        return await asyncio.to_thread(describe, endpoints, is_login_required=node.security.http_login)

    async def cluster(parameters: Parameters) -> schemas.Cluster:
        scope = cluster_scope(require_image(node), own_view(node), parameters.access)
        # Counting thousands of partitions takes time. The image is immutable, so this can run off the event loop.
        return await asyncio.to_thread(cluster_view, scope)

    async def topics(parameters: Parameters) -> schemas.Topics:
        visible = visible_topics(parameters.access, topics_by_name(require_image(node)))
        return await asyncio.to_thread(topics_view, visible)

    async def topic(parameters: Parameters) -> schemas.Topic:
        require_visible_topic(parameters.access, parameters.name)
        view = topic_view(node, require_topic(node, parameters.name))
        configs = visible_configs(parameters.access, view.name, view.configs)
        return msgspec.structs.replace(view, configs=configs, shares=visible_shares(parameters.access, view.shares))

    async def groups(parameters: Parameters) -> schemas.Groups:
        return visible_groups(parameters.access, await sampled(partial(groups_view, node)))

    async def group(parameters: Parameters) -> schemas.Group:
        require_visible_group(parameters.access, parameters.name)
        return visible_group(parameters.access, await sampled(partial(group_view, parameters.name, node)))

    async def transactions(parameters: Parameters) -> schemas.Transactions:
        return visible_transactions(parameters.access, await sampled(partial(transactions_view, node)))

    async def pipelines_of(parameters: Parameters) -> schemas.Pipelines:
        require_pipelines(parameters.access)
        return await hub.pipelines.view()

    async def client_metrics(parameters: Parameters) -> schemas.ClientMetrics:
        require_cluster(parameters.access, "the metrics of clients")
        return client_metrics_view(node)

    async def sampled(view: Callable[[OffsetSampler], Awaitable[T]]) -> T:
        """Run a view that queries other brokers, over its own connections."""
        async with sampling, aclosing(OffsetSampler(node)) as sampler:
            return await view(sampler)

    plain = partial(Endpoint, parameters=None, media_type=PLAIN_TEXT, need="metrics")
    session = partial(Endpoint, "/api/session", answer=schemas.Session, need="nothing")
    endpoints = [
        plain("/healthz", healthz, "Whether the process is alive.", is_always_available=True),
        plain("/readyz", readyz, "Whether the node serves clients."),
        plain("/metrics", metrics, "The Prometheus metrics of this node.", is_always_available=True),
        Endpoint("/api/openapi.json", description, "This description.", schemas.OpenApi, is_always_available=True),
        session(guard.session, "Who is logged in."),
        session(guard.log_in, "Log in, from the page.", method="POST", body=LOGIN_SCHEMA),
        session(guard.log_out, "Log out, from the page.", method="DELETE"),
        Endpoint(
            "/api/tokens",
            guard.new_token,
            "Get a bearer token, with a password or a session.",
            schemas.Token,
            (TOKEN_SECONDS,),
            method="POST",
            need="nothing",
        ),
        Endpoint("/api/cluster", cluster, "The cluster as this node knows it.", schemas.Cluster),
        Endpoint("/api/topics", topics, "A summary of each topic.", schemas.Topics),
        Endpoint(
            "/api/topics/{name}", topic, "One topic, with the offsets of this node's own replicas.", schemas.Topic
        ),
        Endpoint(
            "/api/topics/{name}/batches",
            partial(batches.batches_page, node),
            "The headers of a range of batches.",
            schemas.Batches,
            batches.PARAMETERS,
        ),
        Endpoint(
            "/api/topics/{name}/messages",
            partial(messages.messages_page, node),
            "Decoded records.",
            schemas.Messages,
            messages.PARAMETERS,
        ),
        Endpoint("/api/groups", groups, "Consumer groups, the largest lag first.", schemas.Groups),
        Endpoint(
            "/api/groups/{name:path}",
            group,
            "One group with its members and partitions. Its name may contain slashes.",
            schemas.Group,
        ),
        Endpoint("/api/transactions", transactions, "Open transactions, the oldest first.", schemas.Transactions),
        Endpoint("/api/pipelines", pipelines_of, "Running pipelines and their jobs.", schemas.Pipelines),
        Endpoint(
            "/api/client-metrics",
            client_metrics,
            "Metrics that clients have pushed to this node.",
            schemas.ClientMetrics,
        ),
        Endpoint(
            "/api/traces",
            partial(traces.traces_page, node),
            "The trace events of this node.",
            schemas.Traces,
            traces.PARAMETERS,
            is_always_available=True,
        ),
        Endpoint(
            "/api/doctor/{name}",
            doctor.Doctor(node).examine,
            "Examine a topic: one verdict with its evidence.",
            Diagnosis,
            doctor.PARAMETERS,
        ),
        Endpoint(
            "/api/events",
            hub.open,
            "Server-sent events. The stream ends when the node stops.",
            parameters=events.PARAMETERS,
            media_type=events.EVENT_STREAM,
        ),
    ]
    return endpoints


def _page_routes(guard: Guard) -> list[Route]:
    """Return the routes of `/` and of the files that it uses. Without a log-in, `/` is the log-in form."""
    files = {path.name: PageFile(path) for path in sorted(PAGE_FOLDER.iterdir()) if path.suffix in PAGE_CONTENT_TYPES}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "")
        if name not in PUBLIC_FILES:
            try:
                visitor = await guard.admit(request, "login")
            except Refusal as refusal:
                if name or refusal.status != 401:
                    raise
                return files[LOGIN_FILE].answer(request)
            name = name or "index.html"
        else:
            visitor = EVERYONE
        if name not in files:
            raise Refusal(404, f"the page has no file {name[:100]}: see /")
        answer = files[name].answer(request)
        guard.renew(request, visitor, answer)
        return answer

    return [Route("/", file), Route("/page/{name}", file)]


class PageFile:
    """A file of the page, read once. Browsers revalidate it on every request, since the node may have been upgraded."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._headers = {
            "content-type": PAGE_CONTENT_TYPES[path.suffix],
            "etag": f'"{hashlib.sha256(self._content).hexdigest()[:32]}"',
            "cache-control": "no-cache",
            # The same address is the page or the log-in form.
            "vary": "cookie",
        }

    def answer(self, request: Request) -> Response:
        etags = request.headers.get("if-none-match", "")
        if self._headers["etag"] in [etag.strip().removeprefix("W/") for etag in etags.split(",")]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)
