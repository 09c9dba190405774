"""The HTTP application of one node: /healthz (alive), /readyz (serving), /metrics (Prometheus)."""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from chronik.observe.metrics import Metrics, render

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServedNode(Protocol):
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
        return PlainTextResponse("starting\n", status_code=503)

    async def metrics(request: Request) -> Response:
        # Prometheus' library is imported, and the text is put together, off the loop: both would hold up requests.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, _import_prometheus)
        families = list(node.metrics.collect())
        text = await loop.run_in_executor(None, render, families)
        return Response(text, headers={"content-type": METRICS_CONTENT_TYPE})

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])


def _import_prometheus() -> None:
    import prometheus_client.core  # noqa: F401
